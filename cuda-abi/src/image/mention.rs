//! A search for a name in an image.

use super::{Fatbin, Fields, extent::FATBIN_MAGIC};

/// Bytes of compressed payloads that are unpacked for a search. A larger payload may contain any name.
const LOOK_BYTES: u64 = 64 << 20;

/// Returns which names a PTX text or the symbols of a cubin in the image may mention. An image that cannot be read, or only at
/// great cost, may mention all of them.
#[must_use]
pub fn may_mention<const NAMES: usize>(image: &[u8], names: [&[u8]; NAMES]) -> [bool; NAMES] {
    let found = |bytes: &[u8]| names.map(|name| mentions(bytes, name));
    if image.u32_at(0) != Some(FATBIN_MAGIC) {
        return found(image);
    }
    let Ok(fatbin) = Fatbin::parse(image) else { return [true; NAMES] };
    let mut left = LOOK_BYTES;
    let mut all = [false; NAMES];
    for entry in fatbin.entries() {
        let Ok(payload) = entry.and_then(|entry| entry.payload(left)) else { return [true; NAMES] };
        left = left.saturating_sub(payload.len() as u64);
        all.iter_mut().zip(found(&payload)).for_each(|(all, here)| *all |= here);
    }
    all
}

/// True if a name ends with `name`. Only the end counts: tables of symbols may store a name as the end of a longer one.
fn mentions(bytes: &[u8], name: &[u8]) -> bool {
    let continues = |byte: &u8| byte.is_ascii_alphanumeric() || b"_$".contains(byte);
    memchr::memmem::find_iter(bytes, name).any(|at| !bytes[at + name.len()..].first().is_some_and(continues))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_is_found_in_text_and_assumed_in_unreadable_images() {
        let text = b".extern .func (.param .b32 r) vprintf";
        assert_eq!(may_mention(text, [b"vprintf", b"malloc"]), [true, false]);
        assert_eq!(may_mention(b".visible .entry quiet()", [b"vprintf"]), [false]);
        assert_eq!(may_mention(b"call malloc_pool, (n);", [b"malloc"]), [false]);
        assert_eq!(may_mention(b"\0my_malloc\0", [b"malloc"]), [true]);
        let damaged =
            [&FATBIN_MAGIC.to_le_bytes()[..], &[1, 0, 16, 0, 8, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3]].concat();
        assert_eq!(may_mention(&damaged, [b"vprintf", b"malloc"]), [true, true]);
    }

    #[test]
    fn name_is_found_in_compressed_entries() {
        let fatbin = |text: &[u8]| {
            let packed = lz4_flex::block::compress(text);
            let padded = packed.len().next_multiple_of(8);
            let mut entry = vec![0_u8; 64];
            entry[0..4].copy_from_slice(&[1, 0, 1, 1]);
            entry[4..8].copy_from_slice(&64_u32.to_le_bytes());
            entry[8..16].copy_from_slice(&(padded as u64).to_le_bytes());
            entry[16..20].copy_from_slice(&u32::try_from(packed.len()).unwrap().to_le_bytes());
            entry[28..32].copy_from_slice(&80_u32.to_le_bytes());
            entry[40..48].copy_from_slice(&0x2000_u64.to_le_bytes());
            entry[56..64].copy_from_slice(&(text.len() as u64).to_le_bytes());
            entry.extend_from_slice(&packed);
            entry.resize(64 + padded, 0);
            let header =
                [&FATBIN_MAGIC.to_le_bytes()[..], &[1, 0, 16, 0], &(entry.len() as u64).to_le_bytes()];
            [&header.concat()[..], &entry].concat()
        };
        let filler = "mov.b32 %r1, %r2; ".repeat(50);
        let calls = format!("{filler}call vprintf;");
        assert_eq!(may_mention(&fatbin(calls.as_bytes()), [b"vprintf", b"malloc"]), [true, false]);
        assert_eq!(may_mention(&fatbin(filler.as_bytes()), [b"vprintf"]), [false]);
    }
}
