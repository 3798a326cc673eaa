//! Frames of a stream: each survives its encoding, nothing else is one, and every call that names arena memory is known.

use proptest::prelude::*;
use sluice_protocol::{
    calls::{WIRE, wire},
    field::{ArenaAddress, DeviceAddress, FieldError, Mint, Size, Writer},
    handle::Id,
    limits,
    record::{self, Header, NO_REPLY},
    session::{Attachment, LATE_ERRORS, LateError},
    staged::{Range, Staged, staged},
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
    fn every_frame_survives_its_encoding(guest in from_guest(), host in to_guest()) {
        prop_assert_eq!(FromGuest::decode(&guest.encode()), Ok(guest));
        prop_assert_eq!(ToGuest::decode(&host.encode()), Ok(host));
    }

    // Promise: V20
    #[test]
    fn whatever_decodes_is_a_frame_and_has_a_payload_within_its_bounds(
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

fn of(call: u16, put: impl FnOnce(&mut Writer<'_>) -> Result<(), FieldError>) -> Result<Staged, FieldError> {
    let header = Header { call, reply: NO_REPLY, ticket: 0, context: 1, stream: 0, thread: 0, sequence: 1 };
    let mut buffer = [0; 4096];
    let mut writer = Writer::new(&mut buffer);
    put(&mut writer)?;
    let length = writer.length();
    staged(&header, &buffer[..length])
}

// Promise: V20
#[test]
fn what_calls_do_with_arena_memory_is_known() {
    const A: u64 = limits::WINDOW_BOUNDS.start;
    let (device, arena) = (DeviceAddress(limits::WINDOW_BOUNDS.end - 4096), ArenaAddress(A));
    let range = |address, bytes| Some(Range { address, bytes });
    let reads = |read| Ok(Staged { reads: [read, None], writes: None });
    let writes = |writes| Ok(Staged { writes, ..Staged::default() });

    let copy = |bytes| of(wire::copy_to_device::CALL, |w| wire::copy_to_device::put(w, device, arena, bytes));
    assert_eq!(copy(100), reads(range(A, 100)));
    assert_eq!(copy(0), reads(None));
    assert_eq!(copy(u64::MAX), Err(FieldError::Range), "behind the end of all addresses");
    let back = of(wire::copy_from_device::CALL, |w| wire::copy_from_device::put(w, arena, device, 7));
    assert_eq!(back, writes(range(A, 7)));

    let rows = |direction, pitch, width, height| {
        of(wire::copy_rows::CALL, |w| wire::copy_rows::put(w, direction, A, pitch, A, pitch, width, height))
    };
    assert_eq!(rows(0, 16, 16, 4), reads(range(A, 64)));
    assert_eq!(rows(1, 16, 16, 4), writes(range(A, 64)));
    assert_eq!(rows(1, 100, 16, 1), writes(range(A, 16)), "one row has no gaps");
    assert_eq!(rows(1, 17, 16, 2), Err(FieldError::Range), "what lies in gaps is not the call's");
    assert_eq!(rows(0, u64::MAX, u64::MAX, 2), Err(FieldError::Range));
    assert_eq!(rows(2, 17, 16, 2), Ok(Staged::default()), "on the device");

    let image = |log_bytes| {
        of(wire::module_load::CALL, |w| {
            let (module, log) = (Mint(Id::new(0, 1)), ArenaAddress(A + 96));
            wire::module_load::put(w, module, false, arena, Size(96), log, Size(log_bytes))
        })
    };
    assert_eq!(image(0), reads(range(A, 96)));
    let logged = Staged { reads: [range(A, 96), range(A + 96, 8)], writes: range(A + 96, 4096) };
    assert_eq!(image(4096), Ok(logged), "a log that is not written is not what was there before");
}

// Promise: V20
#[test]
fn no_call_names_arena_memory_that_is_not_carried() {
    // A row that is added here belongs into `staged`, too.
    let known = ["copy_to_device", "copy_from_device", "copy_rows", "module_load", "module_function_name"];
    let named: Vec<&str> = WIRE
        .iter()
        .filter(|row| row.parameters.iter().any(|parameter| parameter.kind.contains("ArenaAddress")))
        .map(|row| row.name)
        .collect();
    assert!(named.iter().all(|name| known.contains(name)), "{named:?}");
    assert_eq!(named.len() + 1, known.len(), "rows say by a direction which side is the arena's");
}
