//! The device memory that a loaded image takes.

use super::extent::{ELF_MAGIC, FATBIN_MAGIC};
use super::{EntryKind, Fatbin, Fields, nobits_bytes};

/// Bytes of compressed payloads that are unpacked for an estimate. Larger payloads count with their stated size.
const LOOK_BYTES: u64 = 64 << 20;
/// Length up to which a declaration is read. Its array bounds are at its start; initial values may follow, which count as bytes
/// of the text.
const DECLARATION_BYTES: usize = 1024;

/// Estimates the unpacked bytes of the image, and those of variables that have a size but no contents in it. Only one of several
/// entries is loaded, so the largest counts. A part that cannot be read counts with its bytes: the driver reports the error.
#[must_use]
pub fn device_bytes(image: &[u8]) -> u64 {
    if image.u32_at(0) != Some(FATBIN_MAGIC) {
        return payload_bytes(image);
    }
    let Ok(fatbin) = Fatbin::parse(image) else { return image.len() as u64 };
    let mut left = LOOK_BYTES;
    let mut largest = 0;
    for entry in fatbin.entries() {
        let Ok(entry) = entry else { return largest.max(image.len() as u64) };
        let bytes = match entry.payload(left) {
            Ok(payload) => {
                if entry.is_compressed() {
                    left = left.saturating_sub(payload.len() as u64);
                }
                match entry.kind {
                    EntryKind::Other(_) => payload.len() as u64,
                    EntryKind::Ptx | EntryKind::Elf => payload_bytes(&payload),
                }
            }
            Err(_) => entry.unpacked_bytes(),
        };
        largest = largest.max(bytes);
    }
    largest
}

/// A cubin or a PTX text.
fn payload_bytes(bytes: &[u8]) -> u64 {
    let variables =
        if bytes.starts_with(&ELF_MAGIC) { nobits_bytes(bytes).unwrap_or(0) } else { declared_bytes(bytes) };
    (bytes.len() as u64).saturating_add(variables)
}

/// Bytes of the variables that a PTX text declares in global and constant memory. Each instruction that names such memory is
/// skipped in one step, so the time is linear in the length of the text.
fn declared_bytes(text: &[u8]) -> u64 {
    let spaces: [&[u8]; 2] = [b".global", b".const"];
    let of = |space: &[u8]| {
        let declarations = memchr::memmem::find_iter(text, space).filter_map(|at| {
            let before = at.checked_sub(1).and_then(|before| text.get(before));
            let rest = text.get(at + space.len()..)?;
            // In `ld.global.u32` the state space is inside a word.
            let alone = before.is_none_or(|byte| !is_name(*byte)) && rest.first()?.is_ascii_whitespace();
            alone.then(|| variable_bytes(&rest[..rest.len().min(DECLARATION_BYTES)]))
        });
        declarations.fold(0, u64::saturating_add)
    };
    of(spaces[0]).saturating_add(of(spaces[1]))
}

const fn is_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

/// Bytes of the variables of one declaration, which starts after its state space.
fn variable_bytes(declaration: &[u8]) -> u64 {
    let end = declaration.iter().position(|byte| matches!(byte, b';' | b'=' | b'{' | b'(' | b')'));
    let mut rest = &declaration[..end.unwrap_or(declaration.len())];
    let (mut element, mut variable, mut total) = (1_u64, 1_u64, 0_u64);
    while let [byte, tail @ ..] = rest {
        rest = tail;
        match byte {
            b'.' => {
                let length = tail.iter().take_while(|byte| byte.is_ascii_alphanumeric()).count();
                let (word, tail) = tail.split_at(length);
                rest = tail;
                element = element.saturating_mul(match word {
                    b"b16" | b"u16" | b"s16" | b"f16" | b"bf16" | b"v2" => 2,
                    b"b32" | b"u32" | b"s32" | b"f32" | b"f16x2" | b"bf16x2" | b"v4" => 4,
                    b"b64" | b"u64" | b"s64" | b"f64" | b"texref" | b"samplerref" | b"surfref" => 8,
                    b"b128" => 16,
                    _ => 1,
                });
            }
            b'[' => {
                let close = tail.iter().position(|byte| *byte == b']').unwrap_or(tail.len());
                // Without a number, the initial values determine the length.
                variable = variable.saturating_mul(number(&tail[..close]).unwrap_or(1));
            }
            b',' => {
                total = total.saturating_add(element.saturating_mul(variable));
                variable = 1;
            }
            _ => {}
        }
    }
    total.saturating_add(element.saturating_mul(variable))
}

/// Parses a number in PTX syntax.
fn number(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text.trim_ascii()).ok()?.trim_end_matches('U');
    let (digits, radix) = match text.as_bytes() {
        [b'0', b'x' | b'X', ..] => (&text[2..], 16),
        [b'0', b'b' | b'B', ..] => (&text[2..], 2),
        [b'0', _, ..] => (&text[1..], 8),
        _ => (text, 10),
    };
    u64::from_str_radix(digits, radix).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    // Promise: Q6
    #[test]
    fn declared_bytes_sum_global_and_constant_variables() {
        let declared = |text: &str| declared_bytes(text.as_bytes());
        assert_eq!(declared(".visible .global .align 4 .b8 big[67108864];"), 64 * MIB);
        assert_eq!(declared(".global .align 16 .v4 .f32 tiles [ 0x10 ][1024U];"), 16 * 16 * 1024);
        assert_eq!(declared(".const .u32 a[10], b, c[2][3];\n.global\t.f64 d;"), 40 + 4 + 24 + 8);
        assert_eq!(declared(".global .b8 text[] = {1, 2, 3}; .global .b8 more[7] = {0};"), 1 + 7);
        assert_eq!(declared("ld.global.u32 %r1, [%rd1]; st.global.v4.f32 [%rd1+99], {%f1};"), 0);
        assert_eq!(declared(".shared .b8 s[4096]; .local .b8 l[4096]; mov.u64 %rd1, .globally[9];"), 0);
        assert_eq!(declared(".global .b64 a[18446744073709551615];.global .b8 b[5];"), u64::MAX);
        assert_eq!(declared(".global"), 0);
        assert_eq!(declared(".global .u32 x["), 4);
    }

    // Promise: Q6
    #[test]
    fn footprint_of_a_fatbin_is_that_of_its_largest_entry() {
        let entry = |kind: u16, text: &[u8], packed: bool| {
            let stored = if packed { lz4_flex::block::compress(text) } else { text.to_vec() };
            let padded = stored.len().next_multiple_of(8);
            let mut entry = vec![0_u8; 64];
            entry[0..2].copy_from_slice(&kind.to_le_bytes());
            entry[4..8].copy_from_slice(&64_u32.to_le_bytes());
            entry[8..16].copy_from_slice(&(padded as u64).to_le_bytes());
            entry[16..20].copy_from_slice(&u32::try_from(stored.len()).unwrap().to_le_bytes());
            if packed {
                entry[40..48].copy_from_slice(&0x2000_u64.to_le_bytes());
                entry[56..64].copy_from_slice(&(text.len() as u64).to_le_bytes());
            }
            entry.extend_from_slice(&stored);
            entry.resize(64 + padded, 0);
            entry
        };
        let fatbin = |entries: &[Vec<u8>]| {
            let entries = entries.concat();
            let length = entries.len() as u64;
            [&FATBIN_MAGIC.to_le_bytes()[..], &[1, 0, 16, 0], &length.to_le_bytes(), &entries].concat()
        };
        let filler = "add.u32 %r1, %r1, %r2; ".repeat(1000);
        let big = format!(".global .b8 big[1048576]; {filler}");
        let expected = MIB + big.len() as u64;
        let both = fatbin(&[entry(1, big.as_bytes(), true), entry(1, b".global .b8 small[9];", false)]);
        assert!((both.len() as u64) < big.len() as u64, "compressed");
        assert_eq!(device_bytes(&both), expected);
        // A damaged entry counts with its stated size, and so does one of an unknown kind.
        let mut damaged = entry(1, big.as_bytes(), true);
        damaged[64..].fill(0xff);
        assert_eq!(device_bytes(&fatbin(&[damaged])), big.len() as u64);
        assert_eq!(device_bytes(&fatbin(&[entry(7, b"12345678", false)])), 8);
    }
}
