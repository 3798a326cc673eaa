//! Frames of a stream: each round-trips, all other bytes are refused, and every call that names arena memory is known.

use proptest::prelude::*;
use sluice_protocol::{
    calls::{self, Request, WIRE, wire},
    field::{
        ArenaIn, ArenaOut, ArenaRowsIn, ArenaRowsOut, ArenaText, CarriedOptions, DeviceAddress, FieldError,
        Mint, Size, Writer,
    },
    handle::Id,
    limits, record,
    session::{Attachment, HostCall, LATE_ERRORS, LateError},
    staged::{Staged, StagedRange},
    stream::{FromGuest, HEAD_BYTES, ToGuest},
};

fn lengths(least: usize, most: usize) -> impl Strategy<Value = u32> {
    (least..=most).prop_map(|bytes| u32::try_from(bytes).expect("a small number"))
}

fn from_guest() -> impl Strategy<Value = FromGuest> {
    let records = lengths(record::HEADER_BYTES / 8, limits::RECORD_BYTES / 8).prop_map(|words| words * 8);
    prop_oneof![
        any::<u32>().prop_map(|version| FromGuest::Hello { version }),
        any::<(u32, u64)>().prop_map(|(resource, bytes)| FromGuest::Create { resource, bytes }),
        any::<u32>().prop_map(|resource| FromGuest::Destroy { resource }),
        any::<u32>().prop_map(|resource| FromGuest::Open { resource }),
        any::<(u32, u32, u64)>().prop_map(|(resource, slot, address)| FromGuest::Attach {
            resource,
            slot,
            address
        }),
        any::<u32>().prop_map(|slot| FromGuest::Detach { slot }),
        Just(FromGuest::Close),
        records.prop_map(|bytes| FromGuest::Record { bytes }),
        (any::<u64>(), lengths(1, limits::STREAM_BULK_BYTES))
            .prop_map(|(address, bytes)| FromGuest::Bulk { address, bytes }),
        any::<u64>().prop_map(|word| FromGuest::HostReturn { call: HostCall::from_word(word) }),
    ]
}

fn attachment() -> impl Strategy<Value = Attachment> {
    prop_oneof![
        Just(Attachment::Pending),
        any::<u64>().prop_map(Attachment::Adopted),
        any::<u32>().prop_map(Attachment::Refused),
        Just(Attachment::Detached),
        any::<u64>().prop_map(Attachment::Gathered),
    ]
}

fn to_guest() -> impl Strategy<Value = ToGuest> {
    prop_oneof![
        any::<u32>().prop_map(|version| ToGuest::Hello { version }),
        any::<(u32, u32)>().prop_map(|(state, error)| ToGuest::State { state, error }),
        any::<u32>().prop_map(|error| ToGuest::Sticky { error }),
        any::<u64>().prop_map(|head| ToGuest::Room { head }),
        any::<u64>().prop_map(|word| ToGuest::HostCall { call: HostCall::from_word(word) }),
        (0..LATE_ERRORS, any::<(u32, u32)>()).prop_map(|(index, (count, code))| ToGuest::LateError {
            index,
            error: LateError { count, code },
        }),
        any::<u32>().prop_map(|waiting| ToGuest::Console { waiting }),
        (any::<u32>(), attachment()).prop_map(|(slot, attachment)| ToGuest::Attachment { slot, attachment }),
        any::<(u32, u64)>().prop_map(|(slot, sequence)| ToGuest::Sequence { slot, sequence }),
        (any::<(u32, u32, u32)>(), lengths(0, limits::REPLY_BYTES))
            .prop_map(|((slot, ticket, result), bytes)| ToGuest::Reply { slot, ticket, result, bytes }),
        (any::<u64>(), lengths(1, limits::STREAM_BULK_BYTES))
            .prop_map(|(address, bytes)| ToGuest::Bulk { address, bytes }),
    ]
}

proptest! {
    // Promise: V20
    #[test]
    fn every_frame_round_trips(guest in from_guest(), host in to_guest()) {
        prop_assert_eq!(FromGuest::decode(&guest.encode()), Ok(guest));
        prop_assert_eq!(ToGuest::decode(&host.encode()), Ok(host));
    }

    // Promise: V20
    #[test]
    fn random_head_is_refused_or_decodes_to_a_frame_with_a_bounded_payload(
        head in any::<[u8; HEAD_BYTES]>(), kind in 0u8..12, short in any::<bool>(), unused in any::<bool>(),
    ) {
        let mut head = head;
        head[..4].copy_from_slice(&[kind, 0, 0, 0]);
        if short {
            head[6..8].fill(0);
        }
        if unused {
            head[12..].fill(0);
        }
        if let Ok(frame) = FromGuest::decode(&head) {
            prop_assert_eq!(frame.encode(), head);
            let most = match frame {
                FromGuest::Record { .. } => limits::RECORD_BYTES,
                FromGuest::Bulk { .. } => limits::STREAM_BULK_BYTES,
                _ => 0,
            };
            prop_assert!(frame.payload() as usize <= most);
        }
        if let Ok(frame) = ToGuest::decode(&head) {
            prop_assert_eq!(frame.encode(), head);
            prop_assert!(frame.payload() as usize <= limits::STREAM_BULK_BYTES);
        }
    }
}

fn of<R: Request>(call: &R) -> Result<Staged, FieldError> {
    let mut buffer = [0; 4096];
    let mut writer = Writer::new(&mut buffer);
    call.put(&mut writer)?;
    let length = writer.length();
    calls::staged(R::CALL, &buffer[..length])
}

// Promise: V20
#[test]
fn staged_reports_the_arena_memory_that_a_call_reads_and_writes() {
    const A: u64 = limits::WINDOW_BOUNDS.start;
    let device = DeviceAddress(limits::WINDOW_BOUNDS.end - 4096);
    let range = |address, bytes| Some(StagedRange { address, bytes });
    let reads = |read| Ok(Staged { reads: [read, None], writes: None });
    let writes = |writes| Ok(Staged { writes, ..Staged::default() });

    let copy = |bytes| of(&wire::memcpy_htod::Args { to: device, from: ArenaIn { address: A, bytes } });
    assert_eq!(copy(100), reads(range(A, 100)));
    assert_eq!(copy(0), reads(None));
    assert_eq!(copy(u64::MAX), Err(FieldError::Range), "behind the end of all addresses");
    let back = of(&wire::memcpy_dtoh::Args { to: ArenaOut { address: A, bytes: 7 }, from: device });
    assert_eq!(back, writes(range(A, 7)));

    let rows_in = |pitch, width, height| {
        let from = ArenaRowsIn { address: A, pitch, width, height };
        of(&wire::memcpy_2d_htod::Args { to: device, to_pitch: pitch, from })
    };
    let rows_out = |pitch, width, height| {
        let to = ArenaRowsOut { address: A, pitch, width, height };
        of(&wire::memcpy_2d_dtoh::Args { to, from: device, from_pitch: pitch })
    };
    assert_eq!(rows_in(16, 16, 4), reads(range(A, 64)));
    assert_eq!(rows_out(16, 16, 4), writes(range(A, 64)));
    assert_eq!(rows_out(100, 16, 1), writes(range(A, 16)), "one row has no gaps");
    assert_eq!(rows_out(17, 16, 2), Err(FieldError::Range), "memory in gaps is not the call's");
    assert_eq!(rows_in(u64::MAX, u64::MAX, 2), Err(FieldError::Range));
    let on_device = wire::memcpy_2d_dtod::Args {
        to: device,
        to_pitch: 17,
        from: device,
        from_pitch: 17,
        width: 16,
        height: 2,
    };
    assert_eq!(of(&on_device), Ok(Staged::default()));

    let image = |log_bytes| {
        of(&wire::module_load::Args {
            module: Mint(Id::new(0, 1)),
            library: false,
            image: ArenaIn { address: A, bytes: 96 },
            options: CarriedOptions::NONE,
            info: Size(0),
            error: Size(0),
            report: ArenaText { address: A + 96, bytes: log_bytes },
        })
    };
    assert_eq!(image(0), reads(range(A, 96)));
    let logged = Staged { reads: [range(A, 96), range(A + 96, 8)], writes: range(A + 96, 4096) };
    assert_eq!(image(4096), Ok(logged), "a log that is not written holds no older bytes");
}

// Promise: V20
#[test]
fn every_call_that_names_arena_memory_carries_it() {
    // Only the kinds of arena memory hold an address that the worker takes for arena memory, and each is carried. Copies in a plan
    // of a graph name such memory, too: a guest without shared memory refuses them.
    let named: Vec<&str> = WIRE
        .iter()
        .filter(|row| row.parameters.iter().any(|parameter| parameter.kind.contains("Arena")))
        .map(|row| row.name)
        .collect();
    let carried = [
        "graph_instantiate",
        "graph_set_work",
        "graph_update",
        "memcpy_htod",
        "memcpy_dtoh",
        "memcpy_2d_htod",
        "memcpy_2d_dtoh",
        "memcpy_htoa",
        "memcpy_atoh",
        "module_load",
        "module_function_name",
        "link_create",
        "link_add",
        "link_complete",
        "link_image",
    ];
    assert_eq!(named, carried);
}
