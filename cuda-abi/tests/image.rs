//! The image reader, on images built here: well-formed, with one wrong field, truncated, and arbitrary. In one file: they share the
//! builder.

use proptest::prelude::*;
use sluice_cuda_abi::image::*;

const LIMIT: u64 = 1 << 20;
const PTX: u16 = 1;
const ELF: u16 = 2;
const LZ4: u64 = 0x2000;
const ZSTD: u64 = 0x8000;

/// A compressible text with the directive for its target.
fn ptx(target: &str) -> Vec<u8> {
    let mut text = format!("//\n// .target sm_1\n//\n.version 9.5\n.target {target}\n.address_size 64\n");
    for register in 0..200 {
        text += &format!("\tmov.u32 %r{register}, %tid.x;\n");
    }
    text.into_bytes()
}

/// One entry of a fatbin, in the compiler's layout.
struct Made {
    kind: u16,
    arch: u32,
    flags: u64,
    header: u32,
    payload: Vec<u8>,
    stored: u32,
    padded: Option<u64>,
    uncompressed: u64,
}

fn made(kind: u16, arch: u32, flags: u64, contents: &[u8]) -> Made {
    let payload = match flags & (LZ4 | ZSTD) {
        LZ4 => lz4_flex::block::compress(contents),
        ZSTD => ruzstd::encoding::compress_to_vec(contents, ruzstd::encoding::CompressionLevel::Fastest),
        _ => contents.to_vec(),
    };
    let compressed = flags & (LZ4 | ZSTD) != 0;
    Made {
        kind,
        arch,
        flags,
        header: 96,
        stored: if compressed { payload.len().try_into().unwrap() } else { 0 },
        padded: None,
        payload,
        uncompressed: if compressed { contents.len() as u64 } else { 0 },
    }
}

fn fatbin(entries: &[Made]) -> Vec<u8> {
    let mut body = Vec::new();
    for entry in entries {
        let start = body.len();
        let padded = entry.payload.len().next_multiple_of(8);
        body.extend(entry.kind.to_le_bytes());
        body.extend(0x101_u16.to_le_bytes());
        body.extend(entry.header.to_le_bytes());
        body.extend(entry.padded.unwrap_or(padded as u64).to_le_bytes());
        body.extend(entry.stored.to_le_bytes());
        body.extend([0; 4]);
        body.extend([5, 0, 9, 0]);
        body.extend(entry.arch.to_le_bytes());
        body.extend([0; 8]);
        body.extend(entry.flags.to_le_bytes());
        body.extend([0; 8]);
        body.extend(entry.uncompressed.to_le_bytes());
        body.resize(start + entry.header as usize, 0);
        body.extend(&entry.payload);
        body.resize(start + entry.header as usize + padded, 0);
    }
    let mut bytes = vec![0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0];
    bytes.extend((body.len() as u64).to_le_bytes());
    bytes.extend(body);
    bytes
}

fn only_entry(bytes: &[u8]) -> Entry<'_> {
    let mut entries = Fatbin::parse(bytes).unwrap().entries();
    let entry = entries.next().unwrap().unwrap();
    assert!(entries.next().is_none());
    entry
}

/// A reader over memory that ends where `bytes` end.
fn memory(bytes: &[u8]) -> impl FnMut(u64, &mut [u8]) -> bool {
    |offset, buffer| {
        let start = usize::try_from(offset).unwrap();
        let found = start.checked_add(buffer.len()).and_then(|end| bytes.get(start..end));
        if let Some(found) = found {
            buffer.copy_from_slice(found);
        }
        found.is_some()
    }
}

fn extent(bytes: &[u8], limit: u64) -> Result<Extent, ImageError> {
    size_of(&mut memory(bytes), limit)
}

// --- Length ----------------------------------------------------------------------------------------------------------

#[test]
fn wrapper_of_an_unknown_version_or_without_image_is_refused() {
    let mut bytes = [0; Wrapper::SIZE];
    bytes[..4].copy_from_slice(&0x4662_43b1_u32.to_le_bytes());
    bytes[8..16].copy_from_slice(&0x1000_u64.to_le_bytes());
    bytes[16..].copy_from_slice(&0x2000_u64.to_le_bytes());
    for version in [1, 2] {
        bytes[4] = version;
        let expected = Wrapper { version: version.into(), data: 0x1000, fatbins: 0x2000 };
        assert_eq!(Wrapper::parse(&bytes), Ok(Some(expected)));
    }
    for version in [0, 3] {
        bytes[4] = version;
        assert!(matches!(Wrapper::parse(&bytes), Err(ImageError::Invalid(_))));
    }
    bytes[4] = 1;
    bytes[9] = 0;
    assert!(matches!(Wrapper::parse(&bytes), Err(ImageError::Invalid(_))), "a null image");
    bytes[0] ^= 1;
    assert_eq!(Wrapper::parse(&bytes), Ok(None));
}

#[test]
fn fatbin_extent_follows_its_header_and_is_bounded() {
    let bytes = fatbin(&[made(PTX, 80, 0, &ptx("sm_80"))]);
    let mut longer = bytes.clone();
    longer.extend([0xee; 100]);
    let expected = Extent { kind: ImageKind::Fatbin, bytes: bytes.len() as u64 };
    assert_eq!(extent(&longer, LIMIT), Ok(expected));
    assert_eq!(extent(&bytes, bytes.len() as u64), Ok(expected));
    assert_eq!(extent(&bytes, bytes.len() as u64 - 1), Err(ImageError::TooLarge));
    assert_eq!(extent(&bytes[..15], LIMIT), Err(ImageError::Truncated));
    for (at, value) in [(4, 2), (6, 24)] {
        let mut wrong = bytes.clone();
        wrong[at] = value;
        assert!(matches!(extent(&wrong, LIMIT), Err(ImageError::Invalid(_))));
    }
    let mut huge = bytes;
    huge[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(matches!(extent(&huge, u64::MAX), Err(ImageError::Invalid(_))));
    huge[8..16].copy_from_slice(&(u64::MAX - 16).to_le_bytes());
    assert_eq!(extent(&huge, LIMIT), Err(ImageError::TooLarge));
    assert!(matches!(Fatbin::parse(&huge), Err(ImageError::Truncated)));
}

#[test]
fn ptx_extent_ends_at_its_nul_and_is_bounded() {
    for length in [1, 2, 3, 4, 5, 4095, 4096, 4097, 10_000] {
        let mut text = vec![b'x'; length];
        assert_eq!(extent(&text, LIMIT), Err(ImageError::Truncated), "without a NUL");
        text.push(0);
        let expected = Extent { kind: ImageKind::Ptx, bytes: length as u64 + 1 };
        assert_eq!(extent(&text, LIMIT), Ok(expected), "memory ends right after the text");
        assert_eq!(extent(&text, length as u64), Err(ImageError::TooLarge));
        text.extend([0xff; 5000]);
        assert_eq!(extent(&text, LIMIT), Ok(expected), "memory continues after the text");
    }
    assert!(matches!(extent(b"\0", LIMIT), Err(ImageError::Invalid(_))));
    assert!(matches!(extent(b"\x01\x02\x03\x04\0", LIMIT), Err(ImageError::Invalid(_))));
    assert_eq!(extent(b"", LIMIT), Err(ImageError::Truncated));
}

/// Nothing at or beyond the limit is read, even if the memory is readable.
#[test]
fn extent_reads_no_byte_beyond_the_limit() {
    for limit in [0, 1, 3, 4, 63, 64, 100, 5000] {
        for image in [vec![b'x'; 20_000], cubin(&[]).bytes, fatbin(&[made(PTX, 80, 0, &ptx("sm_80"))])] {
            let mut inner = memory(&image);
            let mut read = |offset: u64, buffer: &mut [u8]| {
                assert!(offset + buffer.len() as u64 <= limit);
                inner(offset, buffer)
            };
            if (image.len() as u64) > limit {
                assert_eq!(size_of(&mut read, limit), Err(ImageError::TooLarge));
            }
        }
    }
}

// --- Cubins ----------------------------------------------------------------------------------------------------------

/// A section: name, type, contents, and the size in the header.
struct MadeSection {
    name: String,
    kind: u32,
    contents: Vec<u8>,
    size: u64,
}

fn section(name: &str, kind: u32, contents: Vec<u8>) -> MadeSection {
    MadeSection { name: name.into(), kind, size: contents.len() as u64, contents }
}

fn nobits(name: &str, size: u64) -> MadeSection {
    MadeSection { name: name.into(), kind: 8, contents: Vec::new(), size }
}

struct Cubin {
    bytes: Vec<u8>,
    /// Offset of the section table, which ends the file.
    table: usize,
}

/// A cubin with the given sections, after the null section and before the names.
fn cubin(sections: &[MadeSection]) -> Cubin {
    let mut bytes = vec![0; 64];
    bytes[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\x41");
    bytes[18..20].copy_from_slice(&190_u16.to_le_bytes());
    let mut names = vec![0];
    let mut table = vec![0; 64];
    let strings = section(".shstrtab", 3, Vec::new());
    for section in sections.iter().chain([&strings]) {
        let mut header = [0; 64];
        header[..4].copy_from_slice(&u32::try_from(names.len()).unwrap().to_le_bytes());
        names.extend(section.name.as_bytes());
        names.push(0);
        let contents = if std::ptr::eq(section, &strings) { &names } else { &section.contents };
        let size = if std::ptr::eq(section, &strings) { names.len() as u64 } else { section.size };
        header[4..8].copy_from_slice(&section.kind.to_le_bytes());
        header[24..32].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        header[32..40].copy_from_slice(&size.to_le_bytes());
        bytes.extend(contents);
        table.extend(header);
    }
    let start = bytes.len();
    let count = u16::try_from(table.len() / 64).unwrap();
    bytes[40..48].copy_from_slice(&(start as u64).to_le_bytes());
    bytes[58..60].copy_from_slice(&64_u16.to_le_bytes());
    bytes[60..62].copy_from_slice(&count.to_le_bytes());
    bytes[62..64].copy_from_slice(&(count - 1).to_le_bytes());
    bytes.extend(table);
    Cubin { bytes, table: start }
}

/// The description of a kernel: total size, then (ordinal, offset, size) records in the given order.
fn info(bytes: u16, params: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut info = vec![4, 0x0a, 8, 0, 1, 0, 0, 0, 0x60, 1, 0x1c, 0, 3, 0x19];
    info.extend(bytes.to_le_bytes());
    for (ordinal, offset, size) in params {
        info.extend([4, 0x17, 12, 0, 0, 0, 0, 0]);
        info.extend(ordinal.to_le_bytes());
        info.extend(offset.to_le_bytes());
        info.extend((size << 18 | 0x1f000).to_le_bytes());
    }
    info.extend([1, 0x42, 0xff, 0xff]);
    info
}

#[test]
fn cubin_extent_covers_its_tables_and_sections() {
    let made = cubin(&[section(".text.k", 1, vec![7; 99]), nobits(".nv.global", 1 << 40)]);
    let expected = Ok(Extent { kind: ImageKind::Elf, bytes: made.bytes.len() as u64 });
    let mut longer = made.bytes.clone();
    longer.extend([0xee; 64]);
    assert_eq!(
        extent(&longer, LIMIT),
        expected,
        "the section table is last; a section without contents has no end"
    );

    // A section that ends after the table.
    let mut far = longer.clone();
    let size_field = made.table + 64 + 32;
    far[size_field..size_field + 8].copy_from_slice(&(made.bytes.len() as u64).to_le_bytes());
    assert_eq!(extent(&far, LIMIT).unwrap().bytes, made.bytes.len() as u64 + 64);

    // A program table at the end of the file.
    let mut programs = longer;
    programs[32..40].copy_from_slice(&(made.bytes.len() as u64).to_le_bytes());
    programs[54..56].copy_from_slice(&56_u16.to_le_bytes());
    programs[56..58].copy_from_slice(&1_u16.to_le_bytes());
    assert_eq!(extent(&programs, LIMIT).unwrap().bytes, made.bytes.len() as u64 + 56);

    // The first section contains the number of sections; the header's field is 0.
    let mut extended = made.bytes.clone();
    extended[60..62].copy_from_slice(&[0, 0]);
    extended[made.table + 32] = 4;
    assert_eq!(extent(&extended, LIMIT), expected);
    assert_eq!(cubin_params(&extended, b"k"), Ok(KernelParams::default()));
    let count = made.table + 32..made.table + 40;
    for huge in [u64::MAX, u64::MAX / 64, 1 << 40] {
        extended[count.clone()].copy_from_slice(&huge.to_le_bytes());
        assert!(extent(&extended, LIMIT).is_err());
        assert!(cubin_params(&extended, b"k").is_err());
    }

    for cut in 0..made.bytes.len() {
        assert!(extent(&made.bytes[..cut], LIMIT).is_err(), "cut at {cut}");
    }
    for (at, value) in [(4, 1), (5, 2), (18, 62), (58, 40)] {
        let mut wrong = made.bytes.clone();
        wrong[at] = value;
        assert!(matches!(extent(&wrong, LIMIT), Err(ImageError::Invalid(_))), "byte {at}");
    }
}

#[test]
fn kernel_parameters_are_read_from_the_cubin() {
    let bytes = cubin(&[
        section(".text.two", 1, vec![0; 16]),
        section(".nv.info.two.more", 0x7000_0000, info(4, &[(0, 0, 4)])),
        section(".nv.info.two", 0x7000_0000, info(20, &[(2, 16, 4), (1, 8, 8), (0, 0, 8)])),
        section(".text.none", 1, vec![0; 16]),
        section(".nv.info.empty", 0x7000_0000, info(0, &[])),
    ])
    .bytes;
    let param = |offset, size| Param { offset, size };
    let two = KernelParams { bytes: 20, params: vec![param(0, 8), param(8, 8), param(16, 4)] };
    assert_eq!(cubin_params(&bytes, b"two"), Ok(two));
    assert_eq!(cubin_params(&bytes, b"two.more").unwrap().params, [param(0, 4)]);
    assert_eq!(cubin_params(&bytes, b"none"), Ok(KernelParams::default()));
    assert_eq!(cubin_params(&bytes, b"empty"), Ok(KernelParams::default()));
    for name in [&b"tw"[..], b"two.", b"", b"three"] {
        assert_eq!(cubin_params(&bytes, name), Err(ImageError::NoKernel));
    }
}

#[test]
fn inconsistent_kernel_parameters_are_refused() {
    let wrong: [&[(u16, u16, u32)]; 5] =
        [&[(0, 0, 8), (0, 8, 8)], &[(0, 0, 8), (2, 8, 8)], &[(1, 0, 8)], &[(0, 9, 8)], &[(0, 0, 0x3fff)]];
    for params in wrong {
        let bytes = cubin(&[section(".nv.info.k", 0x7000_0000, info(16, params))]).bytes;
        assert!(matches!(cubin_params(&bytes, b"k"), Err(ImageError::Invalid(_))), "{params:?}");
    }
    let too_large = cubin(&[section(".nv.info.k", 0x7000_0000, info(0xfffc, &[]))]).bytes;
    assert!(matches!(cubin_params(&too_large, b"k"), Err(ImageError::Invalid(_))));
    let cut = cubin(&[section(".nv.info.k", 0x7000_0000, vec![4, 0x17, 12, 0, 0, 0])]).bytes;
    assert_eq!(cubin_params(&cut, b"k"), Err(ImageError::Truncated));
    let short = cubin(&[section(".nv.info.k", 0x7000_0000, vec![4, 0x17, 4, 0, 0, 0, 0, 0])]).bytes;
    assert_eq!(cubin_params(&short, b"k"), Err(ImageError::Truncated));
}

#[test]
fn nobits_sections_are_summed_and_an_overflow_is_refused() {
    let shared = [nobits(".nv.shared.k", 4096), nobits(".nv.reservedSmem.offset0", 64)];
    let [a, b] = shared;
    let bytes = cubin(&[a, nobits(".nv.global", 1000), b, nobits(".nv.global.more", 24)]).bytes;
    assert_eq!(nobits_bytes(&bytes), Ok(1024));
    let bytes = cubin(&[nobits(".nv.global", u64::MAX), nobits(".nv.global", 1)]).bytes;
    assert!(matches!(nobits_bytes(&bytes), Err(ImageError::Invalid(_))));
}

// --- Payloads --------------------------------------------------------------------------------------------------------

#[test]
fn payload_compression_round_trips() {
    let text = ptx("sm_80");
    for flags in [0x11, LZ4 | 0x11, ZSTD | 0x11] {
        let bytes = fatbin(&[made(PTX, 80, flags, &text)]);
        let entry = only_entry(&bytes);
        assert_eq!((entry.kind, entry.arch, entry.isa), (EntryKind::Ptx, 80, (9, 5)));
        let payload = entry.payload(LIMIT).unwrap();
        assert_eq!(&payload[..text.len()], text);
        assert!(payload[text.len()..].iter().all(|byte| *byte == 0) && payload.len() - text.len() < 8);
        assert_eq!(entry.payload(text.len() as u64 - 1), Err(ImageError::TooLarge));
        if flags & (LZ4 | ZSTD) != 0 {
            assert!(bytes.len() < text.len(), "the test must compress");
            assert_eq!(entry.payload(text.len() as u64).unwrap(), text);
        }
    }
    let bytes = fatbin(&[made(7, 80, 0, b"x")]);
    assert_eq!(only_entry(&bytes).kind, EntryKind::Other(7));
}

#[test]
fn payloads_of_the_wrong_size_are_refused() {
    let text = ptx("sm_80");
    for flags in [LZ4, ZSTD] {
        for (uncompressed, expected) in [
            (text.len() as u64 - 1, ImageError::Damaged),
            (text.len() as u64 + 1, ImageError::Damaged),
            (0, ImageError::Damaged),
            (LIMIT + 1, ImageError::TooLarge),
            (u64::MAX, ImageError::TooLarge),
        ] {
            let mut entry = made(PTX, 80, flags, &text);
            entry.uncompressed = uncompressed;
            assert_eq!(
                only_entry(&fatbin(&[entry])).payload(LIMIT),
                Err(expected),
                "{flags:#x} {uncompressed}"
            );
        }
        let mut entry = made(PTX, 80, flags, &text);
        entry.stored -= 3;
        assert_eq!(only_entry(&fatbin(&[entry])).payload(LIMIT), Err(ImageError::Damaged));
        let mut entry = made(PTX, 80, LZ4 | ZSTD, &text);
        entry.flags = LZ4 | ZSTD;
        assert!(matches!(only_entry(&fatbin(&[entry])).payload(LIMIT), Err(ImageError::Invalid(_))));
        // The entry states the other format.
        let mut entry = made(PTX, 80, flags, &text);
        entry.flags = if flags == LZ4 { ZSTD } else { LZ4 };
        assert_eq!(only_entry(&fatbin(&[entry])).payload(LIMIT), Err(ImageError::Damaged));
    }
}

/// A zstd frame that requests a window of 2 GiB is refused before the decoder reserves it.
#[test]
fn huge_zstd_window_is_refused() {
    for (window, expected) in [(0x00, Ok(&b"x"[..])), (0xa8, Err(ImageError::Damaged))] {
        let mut entry = made(PTX, 80, 0, &[0x28, 0xb5, 0x2f, 0xfd, 0x00, window, 0x0b, 0x00, 0x00, b'x']);
        entry.flags = ZSTD;
        entry.stored = 10;
        entry.uncompressed = 1;
        let bytes = fatbin(&[entry]);
        let payload = only_entry(&bytes).payload(LIMIT);
        assert_eq!(payload.as_deref().map_err(|error| *error), expected);
    }
}

#[test]
fn entries_with_impossible_sizes_end_the_fatbin() {
    let whole = || made(PTX, 80, 0, &ptx("sm_80"));
    let changes: [&dyn Fn(&mut Made); 4] = [
        &|entry| entry.padded = Some(u64::MAX),
        &|entry| entry.padded = Some(u64::MAX - 95),
        &|entry| entry.padded = Some(1 << 40),
        &|entry| entry.stored = u32::MAX,
    ];
    for change in changes {
        let mut entry = whole();
        change(&mut entry);
        let bytes = fatbin(&[whole(), entry]);
        let mut entries = Fatbin::parse(&bytes).unwrap().entries();
        assert!(entries.next().unwrap().is_ok());
        assert!(entries.next().unwrap().is_err());
        assert!(entries.next().is_none());
        assert!(select_ptx(&bytes, 80, 1 << 20).is_err());
    }
    // Headers that are too short for their fields, or would not advance the iteration.
    for header in [0, 8, 63] {
        let mut bytes = fatbin(&[whole()]);
        bytes[20..24].copy_from_slice(&u32::to_le_bytes(header));
        assert!(Fatbin::parse(&bytes).unwrap().entries().next().unwrap().is_err());
    }
    let mut named = fatbin(&[whole()]);
    named[16 + 32..16 + 36].copy_from_slice(&u32::MAX.to_le_bytes());
    named[16 + 36..16 + 40].copy_from_slice(&1_u32.to_le_bytes());
    assert!(Fatbin::parse(&named).unwrap().entries().next().unwrap().is_err());
}

#[test]
fn truncated_fatbin_is_refused() {
    let bytes = fatbin(&[made(PTX, 75, LZ4, &ptx("sm_75")), made(PTX, 80, ZSTD, &ptx("sm_80"))]);
    assert!(select_ptx(&bytes, 80, 1 << 20).is_ok());
    for cut in 0..bytes.len() {
        assert!(Fatbin::parse(&bytes[..cut]).is_err());
        if cut > 4 {
            assert!(select_ptx(&bytes[..cut], 80, 1 << 20).is_err());
        }
    }
}

// --- Selection -------------------------------------------------------------------------------------------------------

fn selected(bytes: &[u8], max_sm: u32) -> Result<u32, ImageError> {
    select_ptx(bytes, max_sm, 1 << 20).map(|text| target(&text).unwrap().arch)
}

#[test]
fn highest_architecture_that_fits_is_selected() {
    let entry = |arch: u32, target: &str, flags| made(PTX, arch, flags, &ptx(target));
    let bytes = fatbin(&[
        entry(80, "sm_80", ZSTD),
        made(ELF, 86, 0, b"not looked at"),
        entry(50, "sm_50, texmode_independent", 0),
        entry(90, "sm_90a", LZ4),
        entry(90, "sm_90", LZ4),
        entry(100, "sm_100f", LZ4),
        entry(75, "compute_75", 0),
    ]);
    let expected =
        [(49, None), (50, Some(50)), (74, Some(50)), (75, Some(75)), (80, Some(80)), (89, Some(80))];
    for (max_sm, arch) in expected.into_iter().chain([(90, Some(90)), (100, Some(100)), (120, Some(90))]) {
        assert_eq!(selected(&bytes, max_sm), arch.ok_or(ImageError::NoBinary), "sm_{max_sm}");
    }
    let text = select_ptx(&bytes, 80, 1 << 20).unwrap();
    assert_eq!(text, ptx("sm_80"), "without padding or NUL");
    assert_eq!(select_ptx(&bytes, 80, 100), Err(ImageError::TooLarge));
    let specific = fatbin(&[entry(90, "sm_90a", 0), made(ELF, 90, 0, b"x")]);
    for (device, expected) in [(80, None), (90, Some(90)), (100, None), (120, None)] {
        assert_eq!(selected(&specific, device), expected.ok_or(ImageError::NoBinary), "sm_90a on {device}");
    }
    let family = fatbin(&[entry(100, "sm_100f", 0)]);
    for (device, expected) in [(90, None), (100, Some(100)), (103, Some(100)), (120, None)] {
        assert_eq!(selected(&family, device), expected.ok_or(ImageError::NoBinary), "sm_100f on {device}");
    }
    assert_eq!(selected(&fatbin(&[]), 80), Err(ImageError::NoBinary));
    let liar = fatbin(&[entry(80, "sm_90", 0), entry(75, "sm_75", 0)]);
    assert_eq!(selected(&liar, 80), Ok(75), "the text counts, not the entry");
}

// Promise: C100
#[test]
fn forbidden_parts_of_an_image_are_left_out_or_refused() {
    const FORCED: Selection = Selection { machine_code: false, ptx: true };
    const DISABLED: Selection = Selection { machine_code: true, ptx: false };
    let (text, code) = (ptx("sm_80"), cubin(&[]).bytes);
    assert_eq!(DISABLED.apply(&text, 80), Err(ImageError::CompilationDisabled));
    assert_eq!(FORCED.apply(&text, 80).as_deref(), Ok(&text[..]));
    assert_eq!(FORCED.apply(&code, 80), Err(ImageError::NoBinary));
    assert_eq!(DISABLED.apply(&code, 80).as_deref(), Ok(&code[..]));

    let entry = |kind, arch, flags| made(kind, arch, flags, &ptx("sm_80"));
    let both = fatbin(&[entry(ELF, 80, 0), entry(PTX, 80, LZ4), entry(7, 80, 0)]);
    let kinds = |selection: Selection| -> Vec<EntryKind> {
        let image = selection.apply(&both, 86).unwrap();
        Fatbin::parse(&image).unwrap().entries().map(|entry| entry.unwrap().kind).collect()
    };
    assert_eq!(kinds(Selection::default()), [EntryKind::Elf, EntryKind::Ptx, EntryKind::Other(7)]);
    assert_eq!(kinds(FORCED), [EntryKind::Ptx, EntryKind::Other(7)]);
    assert_eq!(kinds(DISABLED), [EntryKind::Elf, EntryKind::Other(7)]);
    let forced = FORCED.apply(&both, 86).unwrap();
    let entry_of = Fatbin::parse(&forced).unwrap().entries().next().unwrap().unwrap();
    assert_eq!(*entry_of.payload(LIMIT).unwrap(), ptx("sm_80"), "the payload is whole");

    // The code is not the device's: then it would compile PTX, if it could.
    let foreign = fatbin(&[entry(ELF, 75, 0), entry(PTX, 80, 0)]);
    assert_eq!(DISABLED.apply(&foreign, 86), Err(ImageError::CompilationDisabled));
    assert!(FORCED.apply(&foreign, 86).is_ok());
    let newer = fatbin(&[entry(ELF, 80, 0), entry(PTX, 90, 0)]);
    assert_eq!(FORCED.apply(&newer, 86), Err(ImageError::NoBinary));
}

#[test]
fn plain_ptx_is_selected_unchanged_and_a_cubin_is_refused() {
    let mut text = ptx("sm_80");
    assert_eq!(select_ptx(&text, 80, 1 << 20).unwrap(), text);
    let plain = text.clone();
    text.extend(b"\0rubbish");
    assert_eq!(select_ptx(&text, 80, 1 << 20).unwrap(), plain);
    assert_eq!(selected(&text, 75), Err(ImageError::NoBinary));
    assert_eq!(select_ptx(&text, 80, 10), Err(ImageError::TooLarge));
    assert_eq!(selected(&cubin(&[]).bytes, 80), Err(ImageError::NoBinary));
    for rubbish in
        [&b""[..], b"\0", b"hello", b".target", b".target sm_", b".target sm_80x", b"/* .target sm_80 */"]
    {
        assert!(matches!(selected(rubbish, 80), Err(ImageError::Invalid(_))), "{rubbish:?}");
    }
    let target_of = |text: &[u8]| target(text).map(|target| (target.arch, target.suffix));
    assert_eq!(target_of(b"/* .target sm_1 */ .version 8.0 .target sm_90a, debug"), Some((90, Some(b'a'))));
    assert_eq!(target_of(b".target/**/sm_120// x"), Some((120, None)));
    assert_eq!(target_of(b".target sm_99999999999999999999"), None);
}

// --- Anything at all -------------------------------------------------------------------------------------------------

/// Calls every function of the module on the same bytes.
fn read_all(bytes: &[u8]) {
    let limit = 64 << 10;
    if let Ok(found) = extent(bytes, limit) {
        assert!(found.bytes <= limit);
    }
    if let Some(head) = bytes.first_chunk() {
        let _ = Wrapper::parse(head);
    }
    for entry in Fatbin::parse(bytes).into_iter().flat_map(|fatbin| fatbin.entries()).flatten() {
        if let Ok(payload) = entry.payload(limit) {
            assert!(payload.len() as u64 <= limit);
        }
    }
    if let Ok(text) = select_ptx(bytes, 80, 64 << 10) {
        assert!(text.len() as u64 <= limit);
    }
    if let Ok(layout) = cubin_params(bytes, b"k") {
        assert!(layout.params.iter().all(|param| param.offset + param.size <= layout.bytes));
    }
    let _ = nobits_bytes(bytes);
    let _ = target(bytes);
}

/// Overwrites some bytes, and in some cases cuts the end off.
fn damage(
    mut bytes: Vec<u8>,
    changes: &[(prop::sample::Index, u8)],
    cut: Option<prop::sample::Index>,
) -> Vec<u8> {
    for (at, value) in changes {
        let at = at.index(bytes.len());
        bytes[at] = *value;
    }
    if let Some(cut) = cut {
        bytes.truncate(cut.index(bytes.len()));
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    // Promise: C8
    #[test]
    fn arbitrary_bytes_are_read_without_harm(
        magic in prop::sample::select(vec![&b""[..], b"\x50\xed\x55\xba\x01\0\x10\0", b"\x7fELF\x02\x01", b".target "]),
        rest in prop::collection::vec(any::<u8>(), 0..600),
    ) {
        read_all(&[magic, &rest].concat());
    }

    // Promise: C8
    #[test]
    fn damaged_fatbins_are_read_without_harm(
        changes in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 0..6),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let text = ptx("sm_80");
        let entries = [made(PTX, 75, 0, &text), made(PTX, 80, LZ4, &text), made(PTX, 70, ZSTD, &text)];
        read_all(&damage(fatbin(&entries), &changes, cut));
    }

    // Promise: C8
    #[test]
    fn damaged_cubins_are_read_without_harm(
        changes in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 0..6),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let sections = [
            section(".nv.info.k", 0x7000_0000, info(20, &[(2, 16, 4), (1, 8, 8), (0, 0, 8)])),
            nobits(".nv.global", 64),
        ];
        read_all(&damage(cubin(&sections).bytes, &changes, cut));
    }

    // Promise: C8
    #[test]
    fn damaged_streams_decompress_or_fail_within_their_bound(
        lz4: bool,
        contents in prop::collection::vec(0_u8..4, 0..3000),
        changes in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 0..4),
    ) {
        let mut entry = made(PTX, 80, if lz4 { LZ4 } else { ZSTD }, &contents);
        if changes.is_empty() {
            let bytes = fatbin(&[entry]);
            let payload = only_entry(&bytes).payload(LIMIT).unwrap();
            prop_assert_eq!(payload.as_ref(), &contents[..]);
        } else if !entry.payload.is_empty() {
            entry.payload = damage(entry.payload, &changes, None);
            let bytes = fatbin(&[entry]);
            if let Ok(payload) = only_entry(&bytes).payload(LIMIT) {
                prop_assert_eq!(payload.len(), contents.len());
            }
        }
    }
}
