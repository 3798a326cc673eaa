//! The body of an answer that may be hundreds of kilobytes long, written in pieces.
//!
//! One buffer that grows is copied again and again, and leaves the allocator with a gap of its size.

use std::{convert::Infallible, fmt, io};

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, header::CONTENT_LENGTH},
    response::{IntoResponse, Response},
};
use futures_util::stream;

/// Size of a piece, in bytes.
const PIECE: usize = 32 << 10;

/// Text that becomes the body of an answer.
#[derive(Debug, Default)]
pub(crate) struct LongBody {
    full: Vec<Bytes>,
    last: Vec<u8>,
}

impl LongBody {
    pub(crate) fn push(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.last.capacity() == 0 {
                self.last.reserve_exact(PIECE);
            }
            let (fitting, rest) = bytes.split_at(bytes.len().min(PIECE - self.last.len()));
            self.last.extend_from_slice(fitting);
            if self.last.len() == PIECE {
                self.full.push(std::mem::take(&mut self.last).into());
            }
            bytes = rest;
        }
    }
}

impl io::Write for LongBody {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Write for LongBody {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push(text.as_bytes());
        Ok(())
    }
}

impl IntoResponse for LongBody {
    fn into_response(mut self) -> Response {
        self.full.push(self.last.into());
        let length: usize = self.full.iter().map(Bytes::len).sum();
        let pieces = self.full.into_iter().map(Ok::<_, Infallible>);
        let mut response = Response::new(Body::from_stream(stream::iter(pieces)));
        response.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(length));
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_the_written_bytes_in_their_order() {
        for lengths in [&[][..], &[1, PIECE - 1], &[PIECE, 0, 3], &[5, 3 * PIECE, PIECE - 6, 2]] {
            let (mut body, mut all) = (LongBody::default(), Vec::new());
            for (index, length) in lengths.iter().enumerate() {
                let bytes = vec![b'a' + u8::try_from(index).expect("few"); *length];
                body.push(&bytes);
                all.extend(bytes);
            }
            let response = body.into_response();
            assert_eq!(response.headers()[CONTENT_LENGTH], all.len().to_string());
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            let read = runtime.block_on(axum::body::to_bytes(response.into_body(), usize::MAX));
            assert_eq!(read.expect("a body"), all, "{lengths:?}");
        }
    }
}
