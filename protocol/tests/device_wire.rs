//! What the device reads: virtio-gpu commands, doorbells; and the messages between backend processes, byte by byte.

use proptest::prelude::*;
use sluice_protocol::{
    control::{
        self, ArbiterEvent, FromArbiter, FromDevice, FromInventory, FromLauncher, FromWorker, Priority, Run,
        ToArbiter, ToDevice, ToInventory, ToLauncher, ToWorker, VersionError, WorkerSetup, codec,
    },
    custody::{Answer, Growth, Request},
    doorbell::{self, Capset, Doorbell},
    field::FieldError,
    gpu::{self, Command, GpuError, Purpose, answer, command},
    inventory::{Engines, Instance, Name, Place, Places, Profile, Recovery, Switch, Visible, WHOLE},
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

/// Whether a command is the expected one.
type Meaning = Box<dyn Fn(Command<'_>) -> bool>;

/// Every command as Linux's driver sends it: type, body, the length of which all is needed, and what it means.
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
fn more_entries_than_sent_or_allowed_are_refused() {
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
    let plain = gpu::Header { flags: gpu::FLAG_INFO_RING_IDX, ..header };
    assert_eq!(plain.answer(answer::ERR_UNSPEC)[..], words32(&[answer::ERR_UNSPEC, 0, 0, 0, 0, 0]));
    let both = gpu::Header { flags: gpu::FLAG_FENCE | gpu::FLAG_INFO_RING_IDX, ..header };
    assert_eq!(both.answer(answer::OK_NODATA)[4..8], 3u32.to_le_bytes(), "ring_idx stays valid");
}

#[test]
fn capset_and_configuration_are_these_bytes() {
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
    fn any_gpu_bytes_are_refused_or_stay_inside(kind in prop::sample::select(vec![
        command::GET_CAPSET_INFO, command::GET_CAPSET, command::CTX_CREATE, command::RESOURCE_CREATE_BLOB,
        command::ATTACH_BACKING, command::SUBMIT_3D, command::RESOURCE_UNREF, 0, u32::MAX,
    ]), mut bytes in prop::collection::vec(any::<u8>(), 0..400), small: bool) {
        if let Some(first) = bytes.first_chunk_mut() {
            *first = kind.to_le_bytes();
        }
        // Counts that could be true, as random ones never are.
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
    fn any_numbers_are_refused_or_mean_something(operation in 0..8u32, rest in any::<[u32; 4]>()) {
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
    fn any_doorbell_bytes_are_refused_or_mean_something(bytes in prop::collection::vec(any::<u8>(), 0..64), operation in 0..8u64) {
        let mut bytes = bytes;
        if let Some(first) = bytes.first_chunk_mut() {
            *first = operation.to_le_bytes();
        }
        if let Ok(doorbell) = Doorbell::decode(&bytes) {
            prop_assert_eq!(Doorbell::decode(&doorbell.encode()), Ok(doorbell));
        }
    }

    #[test]
    fn any_control_bytes_are_refused_or_mean_something(mut bytes in prop::array::uniform32(any::<u8>()), tag in 0..13u64) {
        bytes[..8].copy_from_slice(&tag.to_le_bytes());
        let mut message = [0; control::BYTES];
        message[..32].copy_from_slice(&bytes);
        if let Ok(read) = ToWorker::decode(&message) {
            prop_assert_eq!(ToWorker::decode(&read.encode()), Ok(read));
        }
        if let Ok(read) = FromWorker::decode(&message) {
            prop_assert_eq!(FromWorker::decode(&read.encode()), Ok(read));
        }
        if let Ok(read) = FromDevice::decode(&message) {
            prop_assert_eq!(FromDevice::decode(&read.encode()), Ok(read));
        }
        if let Ok(read) = FromLauncher::decode(&message) {
            prop_assert_eq!(FromLauncher::decode(&read.encode()), Ok(read));
        }
        if let Ok(read) = Request::decode(&message) {
            prop_assert_eq!(Request::decode(&read.encode()), Ok(read));
        }
        if let Ok(read) = Answer::decode(&message) {
            prop_assert_eq!(Answer::decode(&read.encode()), Ok(read));
        }
        if let Ok(read) = ToArbiter::decode(&message) {
            prop_assert_eq!(ToArbiter::decode(&read.encode()), Ok(read));
        }
        if let Ok(read) = FromArbiter::decode(&message) {
            prop_assert_eq!(FromArbiter::decode(&read.encode()), Ok(read));
        }
        if let Ok(read) = ToInventory::decode(&message) {
            prop_assert_eq!(ToInventory::decode(&read.encode()), Ok(read));
        }
        if let Ok(read) = FromInventory::decode(&message) {
            prop_assert_eq!(FromInventory::decode(&read.encode()), Ok(read));
        }
    }

    #[test]
    fn runs_round_trip(runs in prop::collection::vec(any::<(u64, u64)>(), 0..20), tail in prop::collection::vec(any::<u8>(), 0..16)) {
        let runs: Vec<_> = runs.into_iter().map(|(offset, bytes)| Run { offset, bytes }).collect();
        let mut list = Vec::new();
        runs.iter().for_each(|run| run.push(&mut list));
        prop_assert_eq!(list.len(), runs.len() * Run::BYTES);
        list.extend(tail);
        prop_assert_eq!(Run::list(&list).collect::<Vec<_>>(), runs);
    }

    #[test]
    fn any_setup_bytes_are_refused_or_are_a_setup(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
        if let Ok(setup) = codec::decode::<WorkerSetup>(&bytes) {
            prop_assert_eq!(codec::encode(&setup).unwrap(), bytes);
        }
    }
}

#[test]
fn doorbells_are_these_bytes() {
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

const UUID: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

macro_rules! golden {
    ($ty:ident: $($message:expr => $words:expr, fds $fds:literal;)+) => {
        $(
            let message = $message;
            let mut bytes = [0u8; control::BYTES];
            for (word, chunk) in $words.iter().zip(bytes.chunks_exact_mut(8)) {
                chunk.copy_from_slice(&u64::to_le_bytes(*word));
            }
            assert_eq!(message.encode(), bytes, "{message:?}");
            assert_eq!($ty::decode(&bytes), Ok(message));
            assert_eq!(message.descriptors(), $fds, "{message:?}");
            // Exactly one length.
            for length in [0, 8, 63, 65, 128] {
                let other: Vec<u8> = bytes.iter().copied().chain([0; 64]).take(length).collect();
                assert_eq!($ty::decode(&other), Err(FieldError::Short), "{length} bytes");
            }
        )+
        // Types that do not exist.
        for tag in [0u64, 99, u64::MAX] {
            let mut bytes = [0; control::BYTES];
            bytes[..8].copy_from_slice(&tag.to_le_bytes());
            assert_eq!($ty::decode(&bytes), Err(FieldError::Range), "type {tag}");
        }
    };
}

// Promise: V6
#[test]
fn control_messages_are_these_bytes_and_have_one_length() {
    golden! { ToWorker:
        ToWorker::Begin { version: 1, session: 5 } => [1, 1, 5], fds 2;
        ToWorker::Attach {
            slot: 3, address: 0x7e00_0000_0000, bytes: 0x3000, runs: 2, extents: 1, granule: 0x20_0000, more: true
        } => [2, 3, 0x7e00_0000_0000, 0x3000, 2, 1, 0x20_0000, 1], fds 2;
        ToWorker::Detach { slot: 3 } => [3, 3], fds 0;
        ToWorker::Custody { device: 2 } => [4, 2], fds 1;
    }
    golden! { FromWorker:
        FromWorker::Attached { slot: 3, error: 2 } => [1, 3, 2], fds 0;
        FromWorker::Detached { slot: 3 } => [2, 3], fds 0;
    }
    golden! { FromDevice:
        FromDevice::WorkerWanted { session: 5, user: 6 } => [1, 5, 6], fds 0;
        FromDevice::SessionEnded { session: 5 } => [2, 5], fds 0;
    }
    golden! { ToDevice:
        ToDevice::Worker { session: 5 } => [1, 5], fds 2;
        ToDevice::NoWorker { session: 5, error: 46 } => [2, 5, 46], fds 0;
        ToDevice::Resume {} => [3], fds 0;
    }
    golden! { ToLauncher:
        ToLauncher::StartWorker { vm: 1, session: 5, visible: Visible::Host } => [1, 1, 5, 0, 0, 0], fds 0;
        ToLauncher::StartWorker { vm: 1, session: 5, visible: Visible::Instance(UUID) }
            => [1, 1, 5, 2, 0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908], fds 0;
        ToLauncher::StartDevice { vm: 1, scanouts: 1, direct: true } => [2, 1, 1, 1], fds 0;
        ToLauncher::StartWorker { vm: 1, session: 5, visible: Visible::Ordinal(2) }
            => [1, 1, 5, 3, 0, 2 << 56], fds 0;
        ToLauncher::StartArbiter { unit: 3, visible: Visible::Gpu(UUID) }
            => [3, 3, 1, 0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908], fds 0;
        ToLauncher::StartInventory {} => [4], fds 0;
        ToLauncher::Settle {} => [5], fds 0;
        ToLauncher::KeepWorker { process: 7, started: 0x1_0000_0002 } => [6, 7, 0x1_0000_0002], fds 0;
        ToLauncher::Sweep {} => [7], fds 0;
    }
    golden! { FromLauncher:
        FromLauncher::Started { process: 4711 } => [1, 4711], fds 2;
        FromLauncher::Failed { error: 12 } => [2, 12], fds 0;
        FromLauncher::Settled {} => [3], fds 0;
    }
    golden! { Request:
        Request::Hello { process: 9 } => [1, 9], fds 0;
        Request::Take { serial: 7, bytes: 2 << 20 } => [2, 7, 2 << 20], fds 0;
        Request::Give { lease: 5 } => [3, 5], fds 0;
        Request::Idle { bytes: 6 } => [4, 6], fds 0;
        Request::Grow { serial: 7, reason: Growth::Limit as u32, bytes: 6, left: 9 } => [5, 7, 2, 6, 9], fds 0;
        Request::Grown { serial: 7 } => [6, 7], fds 0;
        Request::Share { serial: 7, share: 8, lease: 5 } => [7, 7, 8, 0, 5], fds 0;
        Request::Unshare { share: 8 } => [8, 8], fds 0;
        Request::Open { serial: 7, share: 8 } => [9, 7, 8], fds 0;
        Request::Pin { serial: 7, bytes: 6 } => [10, 7, 6], fds 0;
        Request::Unpin { bytes: 6 } => [11, 6], fds 0;
        Request::Process { serial: 7, index: 1 } => [12, 7, 1], fds 0;
        Request::Shrunk { reason: 1, bytes: 6 } => [13, 1, 6], fds 0;
    }
    golden! { Answer:
        Answer::Welcome { version: 1, unit: 1, epoch: 2, limit: 6 } => [1, 1, 1, 2, 6], fds 3;
        Answer::Lent { serial: 7, lease: 5, bytes: 6, more: true } => [2, 7, 5, 6, 1], fds 1;
        Answer::Granted { serial: 7, value: 8 } => [3, 7, 8], fds 0;
        Answer::Refused { serial: 7, error: 2 } => [4, 7, 2], fds 0;
        Answer::Recall { bytes: 6 } => [5, 6], fds 0;
        Answer::Process { serial: 7, process: 9, bytes: 6 } => [6, 7, 9, 6], fds 0;
    }
    golden! { ToArbiter:
        ToArbiter::Vm { vm: 1, epoch: 2, limit: 6, guaranteed: 5, headroom: 4, pinned: 3, ancestors: 0 }
            => [1, 1, 2, 6, 5, 4, 3, 0], fds 0;
        ToArbiter::Worker { vm: 1, epoch: 2, process: 9, session: 3, user: 4 } => [2, 1, 2, 9, 3, 4], fds 2;
        ToArbiter::Escrow { ancestor: 1, bytes: 6 } => [3, 1, 6], fds 0;
        ToArbiter::Fence { vm: 1, epoch: 2 } => [4, 1, 2], fds 0;
        ToArbiter::Forget { vm: 1, epoch: 2 } => [5, 1, 2], fds 0;
        ToArbiter::DescribeVm { vm: 1 } => [6, 1], fds 0;
        ToArbiter::DescribeUnit {} => [7], fds 0;
        ToArbiter::Inventory {} => [8], fds 1;
        ToArbiter::Shares { vm: 1, epoch: 2, weight: 100, priority: Priority::High as u32, cap: 500, guarantee: 250, hang: 9 }
            => [9, 1, 2, 100, 2, 500, 250, 9], fds 0;
    }
    golden! { FromArbiter:
        FromArbiter::Ready { bytes: 6, context: 5, margin: 4 } => [1, 6, 5, 4], fds 0;
        FromArbiter::Vm { vm: 1, epoch: 2, lent: 6, headroom: 5, dirty: 4, holders: 3 } => [2, 1, 2, 6, 5, 4, 3], fds 0;
        FromArbiter::Unit { total: 6, lent: 5, clean: 4, dirty: 3, headroom: 2, suspect: 1 }
            => [3, 6, 5, 4, 3, 2, 1], fds 0;
        FromArbiter::WantEscrow { ancestor: 1, bytes: 6 } => [4, 1, 6], fds 0;
        FromArbiter::Event { kind: ArbiterEvent::Leak as u32, vm: 1, process: 9, bytes: 6 } => [5, 4, 1, 9, 6], fds 0;
        FromArbiter::Time { vm: 1, epoch: 2, used: 6, overlapped: 5, waited: 4, turns: 3 }
            => [6, 1, 2, 6, 5, 4, 3], fds 0;
        FromArbiter::Work { vm: 1, epoch: 2, launches: 6, copies: 5, copied: 4, calls: 3 }
            => [7, 1, 2, 6, 5, 4, 3], fds 0;
        FromArbiter::Pinned { vm: 1, epoch: 2, bytes: 6 } => [8, 1, 2, 6], fds 0;
        FromArbiter::Upkeep { scrubs: 6, scrubbed: 5, took: 4, drift: 3 } => [9, 6, 5, 4, 3], fds 0;
    }
    golden! { ToInventory:
        ToInventory::Units { serial: 7 } => [1, 7], fds 0;
        ToInventory::Memory { serial: 7, unit: 1, instance: 4 } => [2, 7, 1, 4], fds 0;
        ToInventory::Process { serial: 7, unit: 1, process: 9, instance: WHOLE } => [3, 7, 1, 9, 0xffff_ffff], fds 0;
        ToInventory::Nth { serial: 7, unit: 1, index: 2, instance: 4 } => [4, 7, 1, 2, 4], fds 0;
        ToInventory::Client {} => [5], fds 1;
        ToInventory::Device { serial: 7, unit: 1 } => [6, 7, 1], fds 0;
        ToInventory::DeviceName { serial: 7, unit: 1, part: 2 } => [7, 7, 1, 2], fds 0;
        ToInventory::Health { serial: 7, unit: 1 } => [8, 7, 1], fds 0;
        ToInventory::Utilization { serial: 7, unit: 1, instance: 4 } => [9, 7, 1, 4], fds 0;
        ToInventory::Profile { serial: 7, unit: 1, index: 2 } => [10, 7, 1, 2], fds 0;
        ToInventory::ProfileName { serial: 7, unit: 1, profile: 19, part: 0 } => [11, 7, 1, 19, 0], fds 0;
        ToInventory::Places { serial: 7, unit: 1, profile: 19 } => [12, 7, 1, 19], fds 0;
        ToInventory::Capacity { serial: 7, unit: 1, profile: 19 } => [13, 7, 1, 19], fds 0;
        ToInventory::Instance { serial: 7, unit: 1, index: 2 } => [14, 7, 1, 2], fds 0;
        ToInventory::Create { serial: 7, unit: 1, profile: 19, start: 3, size: 2 } => [15, 7, 1, 19, 3, 2], fds 0;
        ToInventory::Destroy { serial: 7, unit: 1, instance: 4, profile: 19, start: 3, size: 2 }
            => [16, 7, 1, 4, 19, 3, 2], fds 0;
        ToInventory::SetMig { serial: 7, unit: 1, on: true } => [17, 7, 1, 1], fds 0;
    }
    golden! { FromInventory:
        FromInventory::Units { serial: 7, count: 1 } => [1, 7, 1], fds 0;
        FromInventory::Memory { serial: 7, total: 6, used: 4, free: 2 } => [2, 7, 6, 4, 2], fds 0;
        FromInventory::Process { serial: 7, process: 9, present: true, bytes: 6, busy: 5 } => [3, 7, 9, 1, 6, 5], fds 0;
        FromInventory::Failed { serial: 7, error: 15 } => [4, 7, 15], fds 0;
        FromInventory::Xid { unit: 1, xid: 31, process: 9, instance: 4 } => [5, 1, 31, 9, 4], fds 0;
        FromInventory::Device { serial: 7, uuid: UUID, memory: 6, multiprocessors: 5, node: 1, pci: 0x1_0200 }
            => [6, 7, 0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908, 6, 5, 1, 0x1_0200], fds 0;
        FromInventory::Name { serial: 7, text: Name::part("GPU", 0) } => [7, 7, 0x0055_5047], fds 0;
        FromInventory::Health {
            serial: 7, mig: Switch::On, pending: Switch::Off, ecc: Switch::Absent, recovery: Recovery::Reset,
            uncorrected: 6, repair: true
        } => [8, 7, 1, 0, 2, 1, 6, 1], fds 0;
        FromInventory::Utilization { serial: 7, gpu: 50, memory: 25 } => [9, 7, 50, 25], fds 0;
        FromInventory::Profile {
            serial: 7,
            profile: Profile {
                id: 19, slices: 1, instances: 7, multiprocessors: 16, memory: 6, capabilities: 1,
                engines: Engines { copy: 1, decoder: 2, encoder: 3, jpeg: 4, ofa: 5 },
            }
        } => [10, 7, 1 << 32 | 19, 16 << 32 | 7, 6, 1, 0x05_0403_0201], fds 0;
        FromInventory::Places {
            serial: 7, places: Places::new(&[Place { start: 1, size: 2 }, Place { start: 4, size: 3 }]).unwrap()
        } => [11, 7, 2, 0x0304_0201], fds 0;
        FromInventory::Capacity { serial: 7, count: 5 } => [12, 7, 5], fds 0;
        FromInventory::Instance {
            serial: 7, instance: Instance { gpu: 4, compute: 1, profile: 19, start: 3, size: 2, uuid: UUID }
        } => [13, 7, 1 << 32 | 4, 19, 2 << 32 | 3, 0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908], fds 0;
        FromInventory::Nothing { serial: 7 } => [14, 7], fds 0;
        FromInventory::Done { serial: 7 } => [15, 7], fds 0;
    }
    // Fields have their own ranges.
    let mut wide = ToWorker::Begin { session: 5, version: 1 }.encode();
    wide[12] = 1;
    assert_eq!(ToWorker::decode(&wide), Err(FieldError::Range));
}

fn setup() -> WorkerSetup {
    WorkerSetup {
        vm: 1,
        session: 2,
        driver: "/d.so".to_owned(),
        mapped_runs: 7,
        devices: 0,
        scrub_every_free: false,
        identity: Some(UUID),
    }
}

// Promise: V6, F62
#[test]
fn worker_setup_is_these_bytes_and_nothing_more() {
    let golden = [
        &[1, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0][..],
        b"/d.so",
        &[7, 0, 0, 0, 0, 0, 0, 0, 0, 1],
        &UUID,
    ]
    .concat();
    assert_eq!(codec::encode(&setup()).unwrap(), golden);
    assert_eq!(codec::decode::<WorkerSetup>(&golden).unwrap(), setup());
    for cut in 0..golden.len() {
        assert!(
            matches!(codec::decode::<WorkerSetup>(&golden[..cut]), Err(codec::CodecError::Decode(_))),
            "{cut}"
        );
    }
    let longer = [&golden[..], &[0]].concat();
    assert!(matches!(codec::decode::<WorkerSetup>(&longer), Err(codec::CodecError::Trailing(1))));
    // A length that is not there is refused before anything is allocated for it.
    for length in [6u64, 1 << 20, u64::MAX] {
        let mut forged = golden.clone();
        forged[12..20].copy_from_slice(&length.to_le_bytes());
        assert!(codec::decode::<WorkerSetup>(&forged).is_err(), "{length:#x}");
    }
    let mut not_text = golden.clone();
    not_text[20] = 0xff;
    assert!(codec::decode::<WorkerSetup>(&not_text).is_err());
    // Of another version nothing is read, whatever it looks like.
    let of_next = [&2u32.to_le_bytes()[..], &golden[4..]].concat();
    for bytes in [&of_next[..], &of_next[..4], &[2, 0, 0, 0, 0xff]] {
        let refused = codec::decode::<WorkerSetup>(bytes);
        assert!(
            matches!(refused, Err(codec::CodecError::Version(VersionError { theirs: 2 }))),
            "{refused:?}"
        );
    }
}

#[test]
fn a_setup_longer_than_a_message_is_not_encoded() {
    let long = |bytes| WorkerSetup { driver: "x".repeat(bytes), ..setup() };
    let overhead = codec::encode(&long(0)).unwrap().len();
    let fits = long(limits::CONTROL_BYTES - overhead);
    assert_eq!(codec::decode::<WorkerSetup>(&codec::encode(&fits).unwrap()).unwrap(), fits);
    assert!(codec::encode(&long(limits::CONTROL_BYTES - overhead + 1)).is_err());
}
