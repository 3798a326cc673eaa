//! HTTP over a Unix socket: the subset that a client of the management API needs.
//!
//! One request, one connection: requests are of HTTP/1.0, so that an answer is never chunked and ends with the connection.
//! Answers are bounded in length and in the time between two pieces.

use std::{
    io::{self, BufRead, BufReader, Read, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

/// Limit of an answer's head, in bytes.
const HEAD: u64 = 16 << 10;
/// Limit of an answer's head, in lines.
const HEADERS: usize = 32;
/// Longest pause in an answer: longer than the API takes for its longest answer, and longer than any pause in a stream.
const TIMEOUT: Duration = Duration::from_secs(70);

/// An answer whose body is still to be read.
#[derive(Debug)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// Length of the body in bytes, if the server sent it.
    length: Option<u64>,
    body: BufReader<UnixStream>,
}

/// Sends a request, with a JSON body or none.
///
/// # Errors
/// No answer, or an answer that is not HTTP.
pub fn request(socket: &Path, method: &str, path: &str, body: Option<&[u8]>) -> io::Result<Answer> {
    let mut head = format!("{method} {path} HTTP/1.0\r\nHost: sluice\r\n");
    if let Some(body) = body {
        head.push_str(&format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len()));
    }
    exchange(socket, &format!("{head}\r\n"), body.unwrap_or_default())
}

/// Sends a head and a body as they are. In HTTP/1.1 the head must request `Connection: close`.
///
/// # Errors
/// No answer, or an answer that is not HTTP.
pub fn exchange(socket: &Path, request: &str, body: &[u8]) -> io::Result<Answer> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    match stream.write_all(&[request.as_bytes(), body].concat()) {
        // It may have answered before it had read everything.
        Err(error) if !matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {
            return Err(error);
        }
        _ => {}
    }
    let mut body = BufReader::new(stream);
    let (status, length) = head(&mut body)?;
    Ok(Answer { status, length, body })
}

/// Reads the status, and the length of the body if the server sent it.
fn head(from: &mut impl BufRead) -> io::Result<(u16, Option<u64>)> {
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut text = Vec::new();
    let mut from = from.take(HEAD);
    while !text.ends_with(b"\r\n\r\n") {
        if from.read_until(b'\n', &mut text)? == 0 {
            return Err(invalid("the head of its answer is cut short or too long".to_owned()));
        }
    }
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut parsed = httparse::Response::new(&mut headers);
    parsed.parse(&text).map_err(|error| invalid(format!("its answer is not HTTP: {error}")))?;
    let status = parsed.code.ok_or_else(|| invalid("its answer has no status".to_owned()))?;
    let named = |name: &str| parsed.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
    let length = named("content-length").map(|header| {
        let number = std::str::from_utf8(header.value).ok().and_then(|text| text.trim().parse().ok());
        number.ok_or_else(|| invalid("the length of its answer is not a number".to_owned()))
    });
    Ok((status, length.transpose()?))
}

impl Answer {
    /// Reads the whole body, of at most `most` bytes.
    ///
    /// # Errors
    /// The body is longer, or cut short.
    pub fn read(mut self, most: u64) -> io::Result<Vec<u8>> {
        let mut body = Vec::new();
        let wanted = self.length.unwrap_or(most.saturating_add(1));
        if self.length.is_some_and(|length| length > most) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("its answer is over {most} bytes"),
            ));
        }
        self.body.by_ref().take(wanted).read_to_end(&mut body)?;
        let came = u64::try_from(body.len()).unwrap_or(u64::MAX);
        match self.length {
            Some(length) if came < length => Err(io::ErrorKind::UnexpectedEof.into()),
            None if came > most => {
                Err(io::Error::new(io::ErrorKind::InvalidData, format!("its answer is over {most} bytes")))
            }
            _ => Ok(body),
        }
    }

    /// Reads the next line of the body, of at most `most` bytes; `None` at its end.
    ///
    /// # Errors
    /// The line is longer, or cut short.
    pub fn line(&mut self, most: u64) -> io::Result<Option<String>> {
        let mut line = String::new();
        (&mut self.body).take(most).read_line(&mut line)?;
        match line.strip_suffix('\n') {
            Some(whole) => Ok(Some(whole.to_owned())),
            None if line.is_empty() => Ok(None),
            None => Err(io::Error::new(io::ErrorKind::InvalidData, "a line is cut short or too long")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, thread};

    use super::*;

    /// Sends a request to a server that sends `text` to each client and closes.
    fn ask(text: Vec<u8>) -> io::Result<Answer> {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).expect("a socket");
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let mut line = String::new();
            let mut from = BufReader::new(stream.try_clone().expect("a stream"));
            while line != "\r\n" {
                line.clear();
                from.read_line(&mut line).expect("a request");
            }
            // The client may have had enough.
            _ = stream.write_all(&text);
        });
        let answer = request(&path, "GET", "/", None);
        server.join().expect("a server");
        answer
    }

    // Promise: A20
    #[test]
    fn response_that_is_cut_or_too_long_is_refused() {
        let read = |text: &str, most| {
            let answer = ask(text.as_bytes().to_vec())?;
            Ok::<_, io::Error>((answer.status, answer.read(most)?))
        };
        let long = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabcde";
        assert_eq!(read(long, 5).expect("whole"), (200, b"abcde".to_vec()));
        assert!(read(long, 4).is_err(), "longer than it may be");
        assert!(read(&long.replace("5\r", "6\r"), 9).is_err(), "cut short");
        assert_eq!(read("HTTP/1.1 404 No\r\n\r\nabc", 3).expect("to its end"), (404, b"abc".to_vec()));
        assert!(read("HTTP/1.1 200 OK\r\n\r\nabcd", 3).is_err(), "longer than it may be");
        assert!(read("HTTP/1.1 204 No Content\r\n\r\n", 9).expect("nothing").1.is_empty());
        for bad in
            ["", "HTTP/1.1 200 OK\r\n", "nonsense\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"]
        {
            assert!(read(bad, 9).is_err(), "{bad:?} was taken");
        }
        let endless = format!("HTTP/1.1 200 OK\r\nA: {}\r\n\r\n", "x".repeat(20_000));
        assert!(read(&endless, 9).is_err(), "a head without an end");
    }

    // Promise: A20
    #[test]
    fn response_line_that_is_cut_or_too_long_is_refused() {
        let mut answer = ask(b"HTTP/1.1 200 OK\r\n\r\none\ntwo\nthr".to_vec()).expect("an answer");
        assert_eq!(answer.line(9).expect("a line").as_deref(), Some("one"));
        assert!(answer.line(2).is_err(), "longer than it may be");
        let mut answer = ask(b"HTTP/1.1 200 OK\r\n\r\none\nthr".to_vec()).expect("an answer");
        assert!(answer.line(9).is_ok() && answer.line(9).is_err(), "cut short");
        let mut answer = ask(b"HTTP/1.1 200 OK\r\n\r\n".to_vec()).expect("an answer");
        assert_eq!(answer.line(9).expect("its end"), None);
    }
}
