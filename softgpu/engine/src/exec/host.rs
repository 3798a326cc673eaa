//! The functions of the device runtime: `vprintf`, `__assertfail`, `malloc`, `free`, `cudaGraphSetConditional`.

use super::Fail;
use super::grid::Grid;
use super::mem::{self, Ranges, Spaces};
use crate::api::FaultKind;
use crate::ir::{Argument, Builtin, CallSite};
use crate::ptx::Space;
use crate::regs::{Frame, UNITS};

/// Bytes of a C string that the engine reads at most.
const MAX_STRING: usize = 64 << 10;
/// Bytes of text that one `printf` produces at most.
const MAX_TEXT: usize = 256 << 10;

fn value(frame: &Frame, argument: Option<&Argument>, lane: usize) -> u64 {
    match argument {
        Some(Argument::Words(first, words)) => {
            let low = u64::from(frame.get::<u32>(*first, lane));
            if *words > 1 { low | u64::from(frame.get::<u32>(first + UNITS, lane)) << 32 } else { low }
        }
        Some(Argument::Narrow(slot)) => u64::from(frame.get::<u32>(*slot, lane)),
        Some(Argument::Wide(slot)) => frame.get(*slot, lane),
        _ => 0,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a result has one or two words")]
fn give(frame: &Frame, result: Option<&Argument>, lane: usize, v: u64) {
    match result {
        Some(Argument::Words(first, words)) => {
            frame.set(*first, lane, v as u32);
            if *words > 1 {
                frame.set(first + UNITS, lane, (v >> 32) as u32);
            }
        }
        Some(Argument::Narrow(slot)) => frame.set(*slot, lane, v as u32),
        Some(Argument::Wide(slot)) => frame.set(*slot, lane, v),
        _ => {}
    }
}

struct Reader<'a, 'b> {
    spaces: &'a Spaces<'b>,
    ranges: &'a mut Ranges,
    lane: usize,
}

impl Reader<'_, '_> {
    fn scalar(&mut self, addr: u64, size: u32) -> Result<u64, Fail> {
        mem::peek(self.spaces, self.ranges, Space::Generic, addr, size, self.lane)
    }

    #[expect(clippy::cast_possible_truncation, reason = "one byte was read")]
    fn string(&mut self, addr: u64) -> Result<Vec<u8>, Fail> {
        let mut out = Vec::new();
        while out.len() < MAX_STRING {
            match self.scalar(addr.wrapping_add(out.len() as u64), 1)? {
                0 => break,
                c => out.push(c as u8),
            }
        }
        Ok(out)
    }
}

/// The calling threads: lanes of a warp of a block.
#[derive(Clone, Copy)]
pub(crate) struct Callers {
    pub(crate) block: [u32; 3],
    pub(crate) warp: u32,
    pub(crate) mask: u32,
}

/// Calls a function of the host for each caller, in ascending order of lanes.
pub(crate) fn call(
    grid: &Grid<'_>,
    spaces: &Spaces<'_>,
    ranges: &mut Ranges,
    frame: &Frame,
    which: Builtin,
    site: &CallSite,
    callers: Callers,
) -> Result<(), Fail> {
    let runtime = grid.launch.runtime;
    let mut left = callers.mask;
    let mut failed = None;
    while left != 0 {
        let bit = left.trailing_zeros();
        let lane = bit as usize;
        left &= left - 1;
        let arg = |n: usize| value(frame, site.arguments.get(n), lane);
        let result = site.results.first();
        match which {
            Builtin::Malloc => give(frame, result, lane, runtime.malloc(arg(0))),
            Builtin::Free => runtime.free(arg(0)),
            Builtin::SetConditional => {
                #[expect(clippy::cast_possible_truncation, reason = "an unsigned int")]
                let is_known = runtime.set_conditional(arg(0), arg(1) as u32);
                if !is_known {
                    return Err(Fail::new(FaultKind::IllegalAddress, lane, arg(0)));
                }
            }
            Builtin::Printf => {
                let mut reader = Reader { spaces, ranges, lane };
                let format = reader.string(arg(0))?;
                let (text, count) = print(&mut reader, &format, arg(1))?;
                runtime.print(&text);
                give(frame, result, lane, count);
            }
            Builtin::AssertFail => {
                let mut reader = Reader { spaces, ranges, lane };
                let (message, file, function) =
                    (reader.string(arg(0))?, reader.string(arg(1))?, reader.string(arg(3))?);
                let line = arg(2);
                let [bx, by, bz] = callers.block;
                let [x, y, z] = grid.thread_position(callers.warp * 32 + bit);
                let text = format!(
                    "{}:{line}: {}: block: [{bx},{by},{bz}], thread: [{x},{y},{z}] Assertion `{}` failed.\n",
                    String::from_utf8_lossy(&file),
                    String::from_utf8_lossy(&function),
                    String::from_utf8_lossy(&message)
                );
                runtime.report(text.as_bytes());
                // Each thread whose assertion fails gets a line of text; the fault reports the first thread.
                failed.get_or_insert(lane);
            }
        }
    }
    failed.map_or(Ok(()), |lane| Err(Fail::new(FaultKind::Assert, lane, 0)))
}

/// Formats like C's `printf`; arguments are packed at their natural alignment. Returns the text and the number of arguments.
fn print(reader: &mut Reader<'_, '_>, format: &[u8], arguments: u64) -> Result<(Vec<u8>, u64), Fail> {
    let mut out = Vec::new();
    let mut at = arguments;
    let mut count = 0;
    let mut k = 0;
    while k < format.len() && out.len() < MAX_TEXT {
        if format[k] != b'%' {
            out.push(format[k]);
            k += 1;
            continue;
        }
        let start = k;
        k += 1;
        let mut take = |reader: &mut Reader<'_, '_>, size: u32| -> Result<u64, Fail> {
            at = at.next_multiple_of(u64::from(size));
            let v = reader.scalar(at, size)?;
            at = at.wrapping_add(u64::from(size));
            Ok(v)
        };
        let mut spec = Spec::default();
        while let Some(&c) = format.get(k) {
            match c {
                b'-' => spec.left = true,
                b'+' => spec.plus = true,
                b' ' => spec.space = true,
                b'#' => spec.alternate = true,
                b'0' => spec.zero = true,
                _ => break,
            }
            k += 1;
        }
        let mut number = |k: &mut usize, reader: &mut Reader<'_, '_>| -> Result<Option<i64>, Fail> {
            if format.get(*k) == Some(&b'*') {
                *k += 1;
                #[expect(clippy::cast_possible_truncation, reason = "an int was read")]
                let v = take(reader, 4)? as u32;
                return Ok(Some(i64::from(v.cast_signed())));
            }
            let mut v: Option<i64> = None;
            while let Some(c) = format.get(*k).filter(|c| c.is_ascii_digit()) {
                v = Some((v.unwrap_or(0) * 10 + i64::from(c - b'0')).min(4096));
                *k += 1;
            }
            Ok(v)
        };
        if let Some(width) = number(&mut k, reader)? {
            spec.left |= width < 0;
            spec.width = usize::try_from(width.unsigned_abs().min(4096)).unwrap_or(0);
        }
        if format.get(k) == Some(&b'.') {
            k += 1;
            let p = number(&mut k, reader)?.unwrap_or(0);
            spec.precision = usize::try_from(p).ok().map(|p| p.min(4096));
        }
        let mut long = false;
        while let Some(&c) = format.get(k) {
            match c {
                b'l' | b'j' | b'z' | b't' => long = true,
                b'h' => {}
                _ => break,
            }
            k += 1;
        }
        let Some(&conversion) = format.get(k) else {
            out.extend_from_slice(&format[start..]);
            break;
        };
        k += 1;
        let size = if long { 8 } else { 4 };
        count += u64::from(conversion != b'%');
        match conversion {
            b'%' => {
                out.push(b'%');
                continue;
            }
            b'd' | b'i' => {
                let v = super::num::sext(take(reader, size)?, size * 8);
                let body = spec.digits(&v.unsigned_abs().to_string());
                spec.number(&mut out, v < 0, "", &body, spec.precision.is_none());
            }
            b'u' | b'x' | b'X' | b'o' => {
                let v = take(reader, size)?;
                let (text, prefix) = match conversion {
                    b'x' => (format!("{v:x}"), "0x"),
                    b'X' => (format!("{v:X}"), "0X"),
                    b'o' => (format!("{v:o}"), "0"),
                    _ => (v.to_string(), ""),
                };
                let body = spec.digits(&text);
                let prefix = if spec.alternate && v != 0 { prefix } else { "" };
                spec.unsigned(&mut out, prefix, &body);
            }
            b'c' => {
                #[expect(clippy::cast_possible_truncation, reason = "a character is a byte")]
                let c = take(reader, 4)? as u8;
                spec.pad(&mut out, &[c]);
            }
            b'p' => {
                let v = take(reader, 8)?;
                spec.pad(&mut out, format!("{v:#x}").as_bytes());
            }
            b's' => {
                let p = take(reader, 8)?;
                let mut text = if p == 0 { b"(null)".to_vec() } else { reader.string(p)? };
                if let Some(n) = spec.precision {
                    text.truncate(n);
                }
                spec.pad(&mut out, &text);
            }
            b'f' | b'F' | b'e' | b'E' | b'g' | b'G' | b'a' | b'A' => {
                let v = f64::from_bits(take(reader, 8)?);
                let body = spec.float(v.abs(), conversion);
                spec.number(&mut out, v.is_sign_negative() && !v.is_nan(), "", &body, v.is_finite());
            }
            _ => out.extend_from_slice(&format[start..k]),
        }
    }
    Ok((out, count))
}

#[derive(Default)]
struct Spec {
    left: bool,
    plus: bool,
    space: bool,
    alternate: bool,
    zero: bool,
    width: usize,
    precision: Option<usize>,
}

impl Spec {
    fn pad(&self, out: &mut Vec<u8>, text: &[u8]) {
        let fill = self.width.saturating_sub(text.len());
        if !self.left {
            out.extend(std::iter::repeat_n(b' ', fill));
        }
        out.extend_from_slice(text);
        if self.left {
            out.extend(std::iter::repeat_n(b' ', fill));
        }
    }

    fn digits(&self, text: &str) -> String {
        match self.precision {
            Some(0) if text == "0" => String::new(),
            Some(p) => format!("{text:0>p$}"),
            None => text.to_owned(),
        }
    }

    fn number(&self, out: &mut Vec<u8>, negative: bool, prefix: &str, body: &str, may_zero: bool) {
        let sign = if negative {
            "-"
        } else if self.plus {
            "+"
        } else if self.space {
            " "
        } else {
            ""
        };
        let bare = sign.len() + prefix.len() + body.len();
        let zeros = if self.zero && !self.left && may_zero { self.width.saturating_sub(bare) } else { 0 };
        self.pad(out, format!("{sign}{prefix}{}{body}", "0".repeat(zeros)).as_bytes());
    }

    fn unsigned(&self, out: &mut Vec<u8>, prefix: &str, body: &str) {
        let bare = prefix.len() + body.len();
        let zeros = if self.zero && !self.left && self.precision.is_none() {
            self.width.saturating_sub(bare)
        } else {
            0
        };
        self.pad(out, format!("{prefix}{}{body}", "0".repeat(zeros)).as_bytes());
    }

    /// Formats the magnitude of a float in one of C's notations.
    fn float(&self, v: f64, conversion: u8) -> String {
        let upper = conversion.is_ascii_uppercase();
        let text = if v.is_nan() {
            "nan".to_owned()
        } else if v.is_infinite() {
            "inf".to_owned()
        } else {
            let p = self.precision.unwrap_or(6);
            match conversion.to_ascii_lowercase() {
                b'f' => format!("{v:.p$}"),
                b'e' => exponential(v, p),
                b'g' => {
                    let p = p.max(1);
                    let e = exponential(v, p - 1);
                    let exponent: i64 = e.split('e').nth(1).and_then(|x| x.parse().ok()).unwrap_or(0);
                    let digits = i64::try_from(p).unwrap_or(6);
                    if exponent < -4 || exponent >= digits {
                        let (m, x) = e.split_once('e').unwrap_or((&e, "+00"));
                        format!("{}e{x}", self.trim(m))
                    } else {
                        let decimals = usize::try_from(digits - 1 - exponent).unwrap_or(0);
                        self.trim(&format!("{v:.decimals$}"))
                    }
                }
                _ => hexadecimal(v, self.precision),
            }
        };
        if upper { text.to_uppercase() } else { text }
    }

    fn trim(&self, text: &str) -> String {
        if self.alternate || !text.contains('.') {
            return text.to_owned();
        }
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    }
}

fn exponential(v: f64, p: usize) -> String {
    let text = format!("{v:.p$e}");
    let (m, x) = text.split_once('e').unwrap_or((&text, "0"));
    let x: i64 = x.parse().unwrap_or(0);
    format!("{m}e{}{:02}", if x < 0 { '-' } else { '+' }, x.abs())
}

fn hexadecimal(v: f64, precision: Option<usize>) -> String {
    let bits = v.to_bits();
    let (mut e, mut m) = ((bits >> 52 & 0x7ff).cast_signed() - 1023, bits & ((1 << 52) - 1));
    let mut lead = 1;
    if e == -1023 {
        (lead, e) = (0, if m == 0 { 0 } else { -1022 });
    }
    let mut digits = 13;
    if let Some(p) = precision.filter(|&p| p < 13) {
        let drop = 4 * (13 - p as u64);
        let (rest, half) = (m & ((1 << drop) - 1), 1u64 << (drop - 1));
        m >>= drop;
        if rest > half || (rest == half && m & 1 == 1) {
            m += 1;
        }
        if m >> (4 * p) != 0 {
            lead += 1;
            m = 0;
        }
        digits = p;
    }
    let mut text = if digits == 0 { String::new() } else { format!("{m:0digits$x}") };
    match precision {
        None => text.truncate(text.trim_end_matches('0').len()),
        Some(p) => text.extend(std::iter::repeat_n('0', p.saturating_sub(13))),
    }
    let dot = if text.is_empty() { "" } else { "." };
    format!("0x{lead}{dot}{text}p{e:+}")
}
