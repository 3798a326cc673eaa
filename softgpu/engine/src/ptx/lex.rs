//! The token stream. It works on bytes, since strings in `.file` need not be UTF-8.

use crate::api::{LoadError, LoadErrorKind};

/// One token and its line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Token<'a> {
    pub(crate) kind: Tok<'a>,
    pub(crate) line: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Tok<'a> {
    /// A name, including `%` and `$`.
    Ident(&'a str),
    /// The word after a dot, `::` parts included, without the dot.
    Dot(&'a str),
    /// An integer.
    Int(u64),
    /// The bits of an f32 (`0f…`).
    F32(u32),
    /// The bits of an f64 (`0d…` or decimal).
    F64(u64),
    /// The raw bytes of a string.
    Str(&'a [u8]),
    /// One byte of punctuation.
    Punct(u8),
    /// The end of the text.
    Eof,
}

fn is_start(c: u8) -> bool {
    c.is_ascii_alphabetic() || c == b'_' || c == b'$' || c == b'%'
}

fn is_part(c: u8) -> bool {
    c.is_ascii_alphanumeric() || c == b'_' || c == b'$'
}

fn text(bytes: &[u8]) -> &str {
    // The callers pass only runs of ASCII.
    core::str::from_utf8(bytes).unwrap_or("")
}

fn error(line: u32, message: impl Into<String>) -> LoadError {
    LoadError { kind: LoadErrorKind::Syntax, line, message: message.into() }
}

/// Splits PTX into tokens; the last one is [`Tok::Eof`].
pub(crate) fn tokens(src: &[u8]) -> Result<Vec<Token<'_>>, LoadError> {
    let end = src.iter().position(|&c| c == 0).unwrap_or(src.len());
    let src = &src[..end];
    let mut out = Vec::with_capacity(src.len() / 4 + 1);
    let (mut i, mut line) = (0usize, 1u32);
    let at = |i: usize| src.get(i).copied().unwrap_or(0);
    while i < src.len() {
        let c = src[i];
        let start = i;
        let kind = match c {
            b'\n' => {
                line = line.saturating_add(1);
                i += 1;
                continue;
            }
            b' ' | b'\t' | b'\r' | 0x0b | 0x0c => {
                i += 1;
                continue;
            }
            b'/' if at(i + 1) == b'/' => {
                while i < src.len() && src[i] != b'\n' {
                    i += 1;
                }
                continue;
            }
            b'/' if at(i + 1) == b'*' => {
                i += 2;
                loop {
                    if i >= src.len() {
                        return Err(error(line, "unterminated comment"));
                    }
                    if src[i] == b'*' && at(i + 1) == b'/' {
                        break;
                    }
                    line = line.saturating_add(u32::from(src[i] == b'\n'));
                    i += 1;
                }
                i += 2;
                continue;
            }
            b'"' => {
                i += 1;
                while i < src.len() && src[i] != b'"' {
                    if src[i] == b'\n' {
                        return Err(error(line, "unterminated string"));
                    }
                    i += if src[i] == b'\\' { 2 } else { 1 };
                }
                if i >= src.len() {
                    return Err(error(line, "unterminated string"));
                }
                i += 1;
                Tok::Str(&src[start + 1..i - 1])
            }
            b'.' if is_start(at(i + 1)) => {
                i += 1;
                loop {
                    while is_part(at(i)) {
                        i += 1;
                    }
                    if at(i) == b':' && at(i + 1) == b':' && is_part(at(i + 2)) {
                        i += 2;
                    } else {
                        break;
                    }
                }
                Tok::Dot(text(&src[start + 1..i]))
            }
            // `.2d` of textures, and qualifiers like `.8b`.
            b'.' if at(i + 1).is_ascii_digit() => {
                i += 1;
                while is_part(at(i)) {
                    i += 1;
                }
                Tok::Dot(text(&src[start + 1..i]))
            }
            b'%' if !is_start(at(i + 1)) || at(i + 1) == b'%' => {
                i += 1;
                Tok::Punct(c)
            }
            _ if is_start(c) => {
                i += 1;
                while is_part(at(i)) {
                    i += 1;
                }
                Tok::Ident(text(&src[start..i]))
            }
            b'0'..=b'9' => number(src, &mut i, line)?,
            0x21..=0x7e => {
                i += 1;
                Tok::Punct(c)
            }
            _ => return Err(error(line, format!("unexpected byte {c:#04x}"))),
        };
        out.push(Token { kind, line });
    }
    out.push(Token { kind: Tok::Eof, line });
    Ok(out)
}

fn number<'a>(src: &'a [u8], i: &mut usize, line: u32) -> Result<Tok<'a>, LoadError> {
    let start = *i;
    let at = |i: usize| src.get(i).copied().unwrap_or(0);
    let bad = || error(line, "malformed number");
    let digits = |from: usize, radix: u32| {
        let mut j = from;
        while (at(j) as char).is_digit(radix) {
            j += 1;
        }
        j
    };
    let radix_int = |from: usize, to: usize, radix: u32| {
        u64::from_str_radix(text(&src[from..to]), radix).map_err(|_| bad())
    };
    // Values are modulo 2^64 and a constant is an error if that of the digits before one is 2^63 or more, as with the vendor's assembler:
    // it takes 0x7ffffffffffffffff, of 67 bits, and not 0x80000000000000000, of 68.
    let integer = |from: usize, to: usize, radix: u32| {
        let mut digits = text(&src[from..to]).chars().map(|digit| digit.to_digit(radix));
        let value = digits.try_fold(0_u64, |value, digit| {
            let next = value.wrapping_mul(radix.into()).wrapping_add(digit?.into());
            (value < 1 << 63).then_some(next)
        });
        value.filter(|_| from < to).ok_or_else(bad)
    };
    let second = at(start + 1);
    let (value, end) = match (src[start], second) {
        (b'0', b'x' | b'X') => {
            let e = digits(start + 2, 16);
            (integer(start + 2, e, 16)?, e)
        }
        (b'0', b'b' | b'B') => {
            let e = digits(start + 2, 2);
            (integer(start + 2, e, 2)?, e)
        }
        (b'0', b'f' | b'F') => {
            let e = digits(start + 2, 16);
            if e != start + 10 {
                return Err(bad());
            }
            *i = e;
            return Ok(Tok::F32(u32::from_str_radix(text(&src[start + 2..e]), 16).map_err(|_| bad())?));
        }
        (b'0', b'd' | b'D') => {
            let e = digits(start + 2, 16);
            if e != start + 18 {
                return Err(bad());
            }
            *i = e;
            return Ok(Tok::F64(radix_int(start + 2, e, 16)?));
        }
        _ => {
            let mut e = digits(start, 10);
            let exponent = |e: usize| {
                matches!(at(e), b'e' | b'E')
                    && (at(e + 1).is_ascii_digit()
                        || (matches!(at(e + 1), b'+' | b'-') && at(e + 2).is_ascii_digit()))
            };
            if (at(e) == b'.' && at(e + 1).is_ascii_digit())
                || exponent(e)
                || (at(e) == b'.' && !is_start(at(e + 1)))
            {
                if at(e) == b'.' {
                    e = digits(e + 1, 10);
                }
                if exponent(e) {
                    e = digits(e + 2, 10);
                }
                *i = e;
                let v: f64 = text(&src[start..e]).parse().map_err(|_| bad())?;
                return Ok(Tok::F64(v.to_bits()));
            }
            if src[start] == b'0' && e > start + 1 {
                (integer(start, e, 8)?, e)
            } else {
                (integer(start, e, 10)?, e)
            }
        }
    };
    *i = end + usize::from(matches!(at(end), b'U' | b'u'));
    if is_part(at(*i)) {
        return Err(bad());
    }
    Ok(Tok::Int(value))
}
