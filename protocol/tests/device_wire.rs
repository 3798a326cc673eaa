//! The input of the device: virtio-gpu commands and doorbells, byte by byte.

use proptest::prelude::*;
use sluice_protocol::{
    doorbell::{self, Capset, Doorbell},
    field::FieldError,
    gpu::{self, Command, GpuError, Purpose, answer, command},
    limits,
};

/// Little-endian words, one behind the other.
fn words32(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// A command of type `kind` with a fence, then `body`.
fn gpu_command(kind: u32, body: &[u32]) -> Vec<u8> {
    let mut bytes = words32(&[kind, gpu::FLAG_FENCE, 0x5566_7788, 0x1122_3344, 9, 3]);
    bytes.extend(words32(body));
    bytes
}

fn decode(bytes: &[u8]) -> Result<Command<'_>, GpuError> {
    gpu::decode(&gpu::header(bytes).expect("a whole header"), bytes)
}

/// True for the expected command.
type Meaning = Box<dyn Fn(Command<'_>) -> bool>;

/// Every command as Linux's driver sends it: name, bytes, the shortest length that decodes, and a check of the meaning.
fn commands() -> Vec<(&'static str, Vec<u8>, usize, Meaning)> {
    let entries = [0x1000, 0, 0x2000, 0, 0xffff_f000, 7, 0x1000, 0];
    let both = |command_entries: gpu::Entries<'_>| {
        command_entries.iter().collect::<Vec<_>>() == [(0x1000, 0x2000), (0x7_ffff_f000, 0x1000)]
            && command_entries.len() == 2
            && !command_entries.is_empty()
    };
    let with_entries = |head: &[u32]| [head, &entries].concat();
    let debug_name = [0u32; 16];
    vec![
        (
            "display info",
            gpu_command(command::GET_DISPLAY_INFO, &[]),
            24,
            Box::new(|c| c == Command::GetDisplayInfo),
        ),
        (
            "capset info",
            gpu_command(command::GET_CAPSET_INFO, &[5, 0]),
            28,
            Box::new(|c| c == Command::GetCapsetInfo { index: 5 }),
        ),
        (
            "capset",
            gpu_command(command::GET_CAPSET, &[27, 1]),
            32,
            Box::new(|c| c == Command::GetCapset { id: 27, version: 1 }),
        ),
        (
            "context",
            // Only the low byte of context_init names the capset.
            gpu_command(command::CTX_CREATE, &[&[4, 0xabcd_ef1b], &debug_name[..]].concat()),
            32,
            Box::new(|c| c == Command::CtxCreate { capset: 27 }),
        ),
        ("context ends", gpu_command(command::CTX_DESTROY, &[]), 24, Box::new(|c| c == Command::CtxDestroy)),
        (
            "attach",
            gpu_command(command::CTX_ATTACH_RESOURCE, &[6, 0]),
            28,
            Box::new(|c| c == Command::CtxAttach { resource: 6 }),
        ),
        (
            "detach",
            gpu_command(command::CTX_DETACH_RESOURCE, &[6, 0]),
            28,
            Box::new(|c| c == Command::CtxDetach { resource: 6 }),
        ),
        (
            "2D resource",
            gpu_command(command::RESOURCE_CREATE_2D, &[8, 1, 64, 64]),
            40,
            Box::new(|c| c == Command::Create2d { resource: 8, purpose: Purpose::Picture }),
        ),
        (
            "memory without contexts",
            gpu_command(command::RESOURCE_CREATE_2D, &[8, u32::from_le_bytes(*b"slcm"), 3, 4]),
            40,
            Box::new(|c| c == Command::Create2d { resource: 8, purpose: Purpose::Memory }),
        ),
        (
            "token",
            gpu_command(command::RESOURCE_CREATE_2D, &[8, u32::from_le_bytes(*b"slct"), 3, 4]),
            40,
            Box::new(|c| {
                c == Command::Create2d { resource: 8, purpose: Purpose::Token { key: 0x4_0000_0003 } }
            }),
        ),
        (
            "3D resource",
            gpu_command(command::RESOURCE_CREATE_3D, &[8, 0, 0, 1, 64, 1, 1, 1, 0, 0, 0, 0]),
            28,
            Box::new(|c| c == Command::Create { resource: 8 }),
        ),
        (
            "blob",
            gpu_command(command::RESOURCE_CREATE_BLOB, &with_entries(&[8, 1, 1, 2, 0, 0, 0x3000, 0])),
            88,
            Box::new(move |c| matches!(c, Command::CreateBlob { resource: 8, entries } if both(entries))),
        ),
        (
            "backing",
            gpu_command(command::ATTACH_BACKING, &with_entries(&[8, 2])),
            64,
            Box::new(move |c| matches!(c, Command::AttachBacking { resource: 8, entries } if both(entries))),
        ),
        (
            "no backing",
            gpu_command(command::DETACH_BACKING, &[8, 0]),
            28,
            Box::new(|c| c == Command::DetachBacking { resource: 8 }),
        ),
        (
            "unref",
            gpu_command(command::RESOURCE_UNREF, &[8, 0]),
            28,
            Box::new(|c| c == Command::Unref { resource: 8 }),
        ),
        (
            "submit",
            gpu_command(command::SUBMIT_3D, &[8, 0, 0xaabb_ccdd, 0x1122_3344]),
            40,
            Box::new(
                |c| matches!(c, Command::Submit { payload } if payload == words32(&[0xaabb_ccdd, 0x1122_3344])),
            ),
        ),
        ("scanout", gpu_command(command::SET_SCANOUT, &[0; 6]), 24, Box::new(|c| c == Command::Ignored)),
        ("flush", gpu_command(command::RESOURCE_FLUSH, &[0; 6]), 24, Box::new(|c| c == Command::Ignored)),
        (
            "transfer",
            gpu_command(command::TRANSFER_TO_HOST_2D, &[1, 2, 3, 4, 5, 0, 8, 0]),
            52,
            Box::new(|c| c == Command::Transfer { resource: 8, numbers: [1, 2, 3, 4, 5] }),
        ),
        (
            "transfer beyond 4 GiB",
            gpu_command(command::TRANSFER_TO_HOST_2D, &[1, 2, 3, 4, 5, 1, 8, 0]),
            52,
            Box::new(|c| c == Command::Ignored),
        ),
    ]
}

// Promise: V5
#[test]
fn every_gpu_command_decodes_and_every_cut_one_is_refused() {
    for (name, bytes, needed, is_it) in commands() {
        assert!(is_it(decode(&bytes).unwrap()), "{name}: {:?}", decode(&bytes));
        for cut in 0..bytes.len() {
            let part = &bytes[..cut];
            if cut < gpu::HEADER_BYTES {
                assert_eq!(gpu::header(part), None, "{name} cut to {cut}");
            } else if cut < needed {
                assert!(decode(part).is_err(), "{name} cut to {cut}");
            } else {
                assert!(is_it(decode(part).unwrap()), "{name} cut to {cut}");
            }
        }
    }
}

// Promise: V5
#[test]
fn command_with_more_entries_than_sent_or_allowed_is_refused() {
    let many = u32::try_from(limits::RESOURCE_RUNS).unwrap() + 1;
    for (entries, sent) in [(1, 0), (2, 1), (many, 4), (u32::MAX, 0), (1 << 28, 2)] {
        let room = vec![0; sent * 4];
        let backing = gpu_command(command::ATTACH_BACKING, &[&[1, entries], &room[..]].concat());
        assert_eq!(decode(&backing), Err(GpuError::Entries { entries, room: sent }));
        let blob = gpu_command(
            command::RESOURCE_CREATE_BLOB,
            &[&[1, 1, 1, entries, 0, 0, 0, 0], &room[..]].concat(),
        );
        assert_eq!(decode(&blob), Err(GpuError::Entries { entries, room: sent }));
    }
    // One more than allowed is refused even when all are there.
    let all = gpu_command(command::ATTACH_BACKING, &[&[1, many], &vec![0; many as usize * 4][..]].concat());
    assert!(matches!(decode(&all), Err(GpuError::Entries { .. })));
    // The largest command is one the device reads.
    const { assert!(56 + limits::RESOURCE_RUNS * 16 <= limits::GPU_COMMAND_BYTES) };
}

#[test]
fn answers_echo_the_fence_of_a_fenced_command_only() {
    let header = gpu::header(&gpu_command(command::SUBMIT_3D, &[0, 0])).unwrap();
    assert_eq!((header.fence, header.context, header.ring), (0x1122_3344_5566_7788, 9, 3));
    let fenced = words32(&[answer::OK_NODATA, gpu::FLAG_FENCE, 0x5566_7788, 0x1122_3344, 9, 3]);
    assert_eq!(header.answer(answer::OK_NODATA)[..], fenced);
    let plain = gpu::CommandHeader { flags: gpu::FLAG_INFO_RING_IDX, ..header };
    assert_eq!(plain.answer(answer::ERR_UNSPEC)[..], words32(&[answer::ERR_UNSPEC, 0, 0, 0, 0, 0]));
    let both = gpu::CommandHeader { flags: gpu::FLAG_FENCE | gpu::FLAG_INFO_RING_IDX, ..header };
    assert_eq!(both.answer(answer::OK_NODATA)[4..8], 3u32.to_le_bytes(), "ring_idx stays valid");
}

#[test]
fn capset_and_configuration_have_fixed_bytes() {
    let body = Capset { version: 1 }.encode();
    assert_eq!(body[..24], *b"sluice virtio v1\x01\0\0\0\0\0\0\0");
    assert!(body[24..].iter().all(|byte| *byte == 0));
    assert_eq!(Capset::decode(&body), Some(Capset { version: 1 }));
    for cut in 0..24 {
        assert_eq!(Capset::decode(&body[..cut]), None);
    }
    let mut other = body;
    other[15] = b'2';
    assert_eq!(Capset::decode(&other), None);
    assert_eq!(gpu::capset_info()[..], words32(&[27, 0, 64, 0]));
    assert_eq!(gpu::configuration(0)[..], words32(&[0, 0, 0, 1]));
    assert_eq!(gpu::configuration(1)[..], words32(&[0, 0, 1, 1]));
    const { assert!(Capset::ID <= 30, "the guest kernel shifts 32 bits") };
}

fn doorbells() -> impl Strategy<Value = Doorbell> {
    prop_oneof![
        any::<u32>().prop_map(|resource| Doorbell::Open { resource }),
        any::<(u32, u32, u64)>().prop_map(|(resource, slot, address)| Doorbell::Attach {
            resource,
            slot,
            address
        }),
        any::<u32>().prop_map(|slot| Doorbell::Detach { slot }),
        Just(Doorbell::Ring),
        Just(Doorbell::Wait),
        Just(Doorbell::Close),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    // Promise: V5
    #[test]
    fn random_gpu_command_is_refused_or_decodes_within_its_bytes(kind in prop::sample::select(vec![
        command::GET_CAPSET_INFO, command::GET_CAPSET, command::CTX_CREATE, command::RESOURCE_CREATE_BLOB,
        command::ATTACH_BACKING, command::SUBMIT_3D, command::RESOURCE_UNREF, 0, u32::MAX,
    ]), mut bytes in prop::collection::vec(any::<u8>(), 0..400), small: bool) {
        if let Some(first) = bytes.first_chunk_mut() {
            *first = kind.to_le_bytes();
        }
        // Plausible counts, which random ones never are.
        for at in [24, 28, 36].into_iter().filter(|_| small) {
            if let Some(count) = bytes.get_mut(at + 1..at + 4) {
                count.fill(0);
            }
        }
        let Some(header) = gpu::header(&bytes) else {
            prop_assert!(bytes.len() < gpu::HEADER_BYTES);
            return Ok(());
        };
        match gpu::decode(&header, &bytes) {
            Ok(Command::CreateBlob { entries, .. } | Command::AttachBacking { entries, .. }) => {
                prop_assert!(entries.len() <= limits::RESOURCE_RUNS);
                prop_assert!(entries.len() * 16 <= bytes.len());
                prop_assert_eq!(entries.iter().count(), entries.len());
            }
            Ok(Command::Submit { payload }) => {
                prop_assert!(payload.len() + 32 <= bytes.len());
                let _ = Doorbell::decode(payload);
            }
            Ok(_) | Err(_) => {}
        }
    }

    #[test]
    fn command_that_ends_before_its_payload_is_refused(bytes in 28usize..32) {
        let mut submit = vec![0; bytes];
        submit[..4].copy_from_slice(&command::SUBMIT_3D.to_le_bytes());
        let header = gpu::header(&submit).expect("a whole header");
        prop_assert!(gpu::decode(&header, &submit).is_err());
    }

    #[test]
    fn doorbells_round_trip(doorbell in doorbells(), padding in prop::collection::vec(any::<u8>(), 0..64)) {
        let bytes = doorbell.encode();
        prop_assert_eq!(Doorbell::decode(&bytes), Ok(doorbell));
        let padded = [&bytes[..], &padding].concat();
        prop_assert_eq!(Doorbell::decode(&padded), Ok(doorbell), "the guest kernel may pad");
        let needed = match doorbell {
            Doorbell::Open { .. } | Doorbell::Detach { .. } => 16,
            Doorbell::Attach { .. } => 32,
            Doorbell::Ring | Doorbell::Wait | Doorbell::Close => 8,
        };
        for cut in 0..needed {
            prop_assert_eq!(Doorbell::decode(&bytes[..cut]), Err(FieldError::Short));
        }
    }

    #[test]
    fn doorbells_round_trip_as_numbers(doorbell in doorbells()) {
        match doorbell.numbers() {
            Some(numbers) => prop_assert_eq!(Doorbell::from_numbers(numbers), Ok(doorbell)),
            None => prop_assert_eq!(doorbell, Doorbell::Wait, "a token's part"),
        }
    }

    #[test]
    fn random_transfer_numbers_are_refused_or_decode_to_a_doorbell(operation in 0..8u32, rest in any::<[u32; 4]>()) {
        let [a, b, c, d] = rest;
        if let Ok(doorbell) = Doorbell::from_numbers([operation, a, b, c, d]) {
            prop_assert_eq!(doorbell.numbers().and_then(|numbers| Doorbell::from_numbers(numbers).ok()), Some(doorbell));
        }
    }

    #[test]
    fn purposes_round_trip(key in any::<u64>()) {
        for purpose in [Purpose::Picture, Purpose::Memory, Purpose::Token { key }] {
            prop_assert_eq!(Purpose::decode(purpose.encode()), purpose);
        }
    }

    #[test]
    fn random_payload_is_refused_or_decodes_to_a_doorbell(bytes in prop::collection::vec(any::<u8>(), 0..64), operation in 0..8u64) {
        let mut bytes = bytes;
        if let Some(first) = bytes.first_chunk_mut() {
            *first = operation.to_le_bytes();
        }
        if let Ok(doorbell) = Doorbell::decode(&bytes) {
            prop_assert_eq!(Doorbell::decode(&doorbell.encode()), Ok(doorbell));
        }
    }
}

#[test]
fn doorbells_have_fixed_bytes() {
    let golden: [(Doorbell, [u64; 4]); 6] = [
        (Doorbell::Open { resource: 7 }, [1, 7, 0, 0]),
        (Doorbell::Attach { resource: 7, slot: 3, address: 0x7e00_0000_0000 }, [2, 7, 3, 0x7e00_0000_0000]),
        (Doorbell::Detach { slot: 3 }, [3, 3, 0, 0]),
        (Doorbell::Ring, [4, 0, 0, 0]),
        (Doorbell::Wait, [5, 0, 0, 0]),
        (Doorbell::Close, [6, 0, 0, 0]),
    ];
    for (doorbell, words) in golden {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(doorbell.encode()[..], bytes);
        assert_eq!(bytes.len(), doorbell::BYTES);
    }
    for operation in [0u64, 7, u64::MAX] {
        let mut bytes = [0; doorbell::BYTES];
        bytes[..8].copy_from_slice(&operation.to_le_bytes());
        assert_eq!(Doorbell::decode(&bytes), Err(FieldError::Range));
    }
    let mut wide = Doorbell::Open { resource: 1 }.encode();
    wide[12] = 1;
    assert_eq!(Doorbell::decode(&wide), Err(FieldError::Range), "a resource id has 32 bits");
}
