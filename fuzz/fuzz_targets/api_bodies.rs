//! Bodies, words and answers of the management API: any body is one request or is refused, an accepted one is written to a body that is
//! read as the same request, and settings that pass the check lie within their bounds. Any answer of a server is read within its limits.
//!
//! The first byte of the input chooses the kind.

#![no_main]

use libfuzzer_sys::fuzz_target;
use serde::{Serialize, de::DeserializeOwned};
use sluice_api::{
    ByteSize, Error, http,
    json::Object,
    v1::{
        FenceRequest, FitRequest, MemoryShareRequest, MigModeRequest, OrganisationRequest, Policy, Priority,
        ProjectRequest, RulesRequest, SettingsRequest, SizeRequest, TimeShareRequest, UnitKind, VmRequest,
        VmState,
    },
};
use std::{
    fmt::{Debug, Display},
    io::{Read as _, Write as _},
    net::Shutdown,
    os::unix::net::UnixListener,
    path::PathBuf,
    str::FromStr,
    sync::LazyLock,
};

/// Limit of an answer's body, and of a line of it.
const ANSWER: u64 = 4096;

/// Reads a body as the server does; what it accepts is the same when it is written and read again.
fn body<T: DeserializeOwned + Serialize + PartialEq + Debug>(bytes: &[u8]) -> Option<T> {
    let Object(request) = serde_json::from_slice::<Object<T>>(bytes).ok()?;
    let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
    assert_eq!(first, Some(&b'{'), "a request that is no object is accepted");
    let written = serde_json::to_vec(&request).expect("a request can be written");
    let again = serde_json::from_slice::<Object<T>>(&written).map(|Object(again)| again);
    assert_eq!(again.ok().as_ref(), Some(&request), "another request arrives");
    Some(request)
}

/// Settings over the defaults of the host: accepted ones lie within their bounds, and those that were not given are the defaults.
fn settings<R: SettingsRequest + Copy + PartialEq + Debug>(request: R)
where
    R::Settings: Default + Copy + PartialEq + Debug,
{
    let Ok(accepted) = request.over(R::Settings::default()) else { return };
    let kept = R::keeping(accepted);
    assert_eq!(kept.over(R::Settings::default()).ok(), Some(accepted), "accepted settings are out of bounds");
    assert_eq!(request.or(kept), kept.or(request).or(kept), "a value of the request is lost");
}

/// A word of the API is written as it was read.
fn word<T: FromStr + Display>(text: &str) {
    if let Ok(word) = text.parse::<T>() {
        assert_eq!(word.to_string(), text);
    }
}

fn byte_size(text: &str) {
    if let Ok(size) = text.parse::<ByteSize>() {
        assert_eq!(size.to_string().parse::<ByteSize>().ok(), Some(size));
    }
}

static SERVER: LazyLock<(UnixListener, PathBuf)> = LazyLock::new(|| {
    let path = std::env::temp_dir().join(format!("sluice-fuzz-api-{}.sock", std::process::id()));
    let _ = std::fs::remove_file(&path);
    (UnixListener::bind(&path).expect("a socket"), path)
});

/// The answer of a server, which is read whole or in lines.
fn answer(bytes: &[u8], lines: bool) {
    let (listener, path) = LazyLock::force(&SERVER);
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            let (mut stream, _) = listener.accept().expect("a client");
            let _ = stream.write_all(bytes).and_then(|()| stream.shutdown(Shutdown::Write));
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let answer = http::request(path, "GET", "/v1/vms", None);
        read(answer, lines);
        // A thread that is still ending would count as a leak.
        server.join().expect("a server");
    });
}

fn read(answer: std::io::Result<http::Answer>, lines: bool) {
    let Ok(mut answer) = answer else { return };
    if lines {
        while let Ok(Some(line)) = answer.line(ANSWER) {
            assert!(line.len() as u64 <= ANSWER, "a longer line than asked for");
        }
    } else if let Ok(body) = answer.read(ANSWER) {
        assert!(body.len() as u64 <= ANSWER, "a longer body than asked for");
        let _ = serde_json::from_slice::<Error>(&body);
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((kind, bytes)) = input.split_first() else { return };
    let text = String::from_utf8_lossy(bytes);
    match kind % 16 {
        0..=3 => {
            if let Some(request) = body::<VmRequest>(bytes) {
                settings(request.share);
                settings(request.time);
                settings(request.rules);
            }
        }
        4 => drop(body::<SizeRequest>(bytes)),
        5 => drop(body::<OrganisationRequest>(bytes)),
        6 => drop(body::<ProjectRequest>(bytes)),
        7 => drop(body::<FitRequest>(bytes)),
        8 => drop(body::<FenceRequest>(bytes)),
        9 => drop(body::<MigModeRequest>(bytes)),
        10 => byte_size(&text),
        11 => {
            word::<Policy>(&text);
            word::<Priority>(&text);
            word::<UnitKind>(&text);
            word::<VmState>(&text);
        }
        12 => {
            // An option of a command line and its value.
            let (option, value) = text.split_once('=').unwrap_or((&text, ""));
            let mut share = MemoryShareRequest::default();
            let mut time = TimeShareRequest::default();
            let mut rules = RulesRequest::default();
            let set = [
                share.set(option, Some(value)).is_ok(),
                time.set(option, Some(value)).is_ok(),
                rules.set(option, Some(value)).is_ok(),
            ];
            if set == [true; 3] {
                settings(share);
                settings(time);
                settings(rules);
            }
        }
        13 => answer(bytes, true),
        _ => answer(bytes, false),
    }
});
