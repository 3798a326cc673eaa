//! The messages between the backend's processes, byte by byte.

use proptest::prelude::*;
use sluice_messages::{
    control::{
        self, ArbiterEvent, Figures, FromArbiter, FromDevice, FromInventory, FromLauncher, FromWorker,
        HostAccess, LaunchRefusal, Priority, TimeShare, ToArbiter, ToDevice, ToInventory, ToLauncher,
        ToWorker, VersionError, WorkerSetup, codec,
    },
    custody::{CustodyAnswer, CustodyRequest, Growth},
    figures::{UnitBytes, Upkeep, VmTime, WorkCounts},
    inventory::{
        Engines, Instance, InstancePlace, InstancePlaces, InstanceProfile, NamePart, PciAddress, Recovery,
        Switch, Visible, VisibleInstance, WHOLE,
    },
};
use sluice_protocol::field::FieldError;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_control_bytes_are_refused_or_round_trip(mut bytes in prop::array::uniform32(any::<u8>()), tag in 0..13u64) {
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
        if let Ok(read) = CustodyRequest::decode(&message) {
            prop_assert_eq!(CustodyRequest::decode(&read.encode()), Ok(read));
        }
        if let Ok(read) = CustodyAnswer::decode(&message) {
            prop_assert_eq!(CustodyAnswer::decode(&read.encode()), Ok(read));
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
    fn any_setup_bytes_are_refused_or_round_trip(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
        if let Ok(setup) = codec::decode::<WorkerSetup>(&bytes) {
            prop_assert_eq!(codec::encode(&setup).unwrap(), bytes);
        }
    }
}

const UUID: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
const PCI: PciAddress = PciAddress { domain: 1, bus: 0x65, device: 7 };
const INSTANCE: VisibleInstance = VisibleInstance { uuid: UUID, pci: PCI, gpu: 9, compute: 4 };

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
            // Exactly one length is valid.
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

#[test]
fn priority_that_does_not_exist_is_refused() {
    let bytes: Vec<u8> = [9u64, 1, 2, 100, 7, 500, 250, 9].into_iter().flat_map(u64::to_le_bytes).collect();
    assert_eq!(ToArbiter::decode(&bytes), Err(FieldError::Range));
}

// Promise: V6
#[test]
fn control_messages_match_their_golden_bytes_and_have_one_length() {
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
        FromWorker::Unfit { ability: 3, error: 304 } => [3, 3, 304], fds 0;
        FromWorker::Fit {} => [4], fds 0;
    }
    golden! { FromDevice:
        FromDevice::WorkerWanted { session: 5, user: 6 } => [1, 5, 6], fds 0;
        FromDevice::SessionEnded { session: 5 } => [2, 5], fds 0;
    }
    golden! { ToDevice:
        ToDevice::Worker { session: 5, grouped: false } => [1, 5, 0], fds 2;
        ToDevice::Worker { session: 5, grouped: true } => [1, 5, 1], fds 3;
        ToDevice::NoWorker { session: 5, error: 46 } => [2, 5, 46], fds 0;
        ToDevice::Resume {} => [3], fds 0;
    }
    golden! { ToLauncher:
        ToLauncher::StartWorker { vm: 1, session: 5, visible: Visible::Host } => [1, 1, 5, 0, 0, 0, 0, 0], fds 0;
        ToLauncher::StartWorker { vm: 1, session: 5, visible: Visible::Instance(INSTANCE) }
            => [1, 1, 5, 2, 0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908, 0x1_0000_6507, 4 << 32 | 9], fds 0;
        ToLauncher::StartDevice { vm: 1, scanouts: 1, direct: true, fixed_arena: 64 << 20 } => [2, 1, 1, 1, 64 << 20], fds 0;
        ToLauncher::StartWorker { vm: 1, session: 5, visible: Visible::Ordinal(2) }
            => [1, 1, 5, 3, 0, 2 << 56, 0, 0], fds 0;
        ToLauncher::StartArbiter { unit: 3, visible: Visible::Gpu(UUID) }
            => [3, 3, 1, 0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908, 0, 0], fds 0;
        ToLauncher::StartInventory {} => [4], fds 0;
        ToLauncher::Settle {} => [5], fds 0;
        ToLauncher::KeepWorker { process: 7, started: 0x1_0000_0002 } => [6, 7, 0x1_0000_0002], fds 0;
        ToLauncher::Sweep {} => [7], fds 0;
        ToLauncher::Find { process: 7 } => [8, 7], fds 0;
        ToLauncher::StartProbe { unit: 3, visible: Visible::Gpu(UUID) }
            => [9, 3, 1, 0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908, 0, 0], fds 0;
        ToLauncher::Attach { configuration: UUID }
            => [10, 0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908], fds 0;
        ToLauncher::RemoveSockets { vm: 1 } => [11, 1], fds 0;
        ToLauncher::EndAll {} => [12], fds 0;
    }
    golden! { FromLauncher:
        FromLauncher::Started { process: 4711, started: 8, grouped: false } => [1, 4711, 8, 0], fds 2;
        FromLauncher::Started { process: 4711, started: 8, grouped: true } => [1, 4711, 8, 1], fds 3;
        FromLauncher::Failed { error: 12 } => [2, 12], fds 0;
        FromLauncher::Settled {} => [3], fds 0;
        FromLauncher::Found { started: 8, worker: true, grouped: false } => [4, 8, 1, 0], fds 1;
        FromLauncher::Found { started: 8, worker: false, grouped: true } => [4, 8, 0, 1], fds 2;
        FromLauncher::Attached { process: 4711, fresh: true } => [5, 4711, 1], fds 1;
        FromLauncher::Refused { refusal: LaunchRefusal::NoUser } => [6, 6], fds 0;
    }
    golden! { CustodyRequest:
        CustodyRequest::Hello { process: 9 } => [1, 9], fds 0;
        CustodyRequest::Take { serial: 7, bytes: 2 << 20 } => [2, 7, 2 << 20], fds 0;
        CustodyRequest::Give { lease: 5 } => [3, 5], fds 0;
        CustodyRequest::Idle { bytes: 6 } => [4, 6], fds 0;
        CustodyRequest::Grow { serial: 7, reason: Growth::Limit as u32, bytes: 6, spent: 9 } => [5, 7, 2, 6, 9], fds 0;
        CustodyRequest::Grown { serial: 7 } => [6, 7], fds 0;
        CustodyRequest::Share { serial: 7, share: 8, lease: 5 } => [7, 7, 8, 0, 5], fds 0;
        CustodyRequest::Unshare { share: 8 } => [8, 8], fds 0;
        CustodyRequest::Open { serial: 7, share: 8 } => [9, 7, 8], fds 0;
        CustodyRequest::Pin { serial: 7, bytes: 6 } => [10, 7, 6], fds 0;
        CustodyRequest::Unpin { bytes: 6 } => [11, 6], fds 0;
        CustodyRequest::Process { serial: 7, index: 1 } => [12, 7, 1], fds 0;
        CustodyRequest::Shrunk { reason: 1, bytes: 6 } => [13, 1, 6], fds 0;
    }
    golden! { CustodyAnswer:
        CustodyAnswer::Welcome { version: 1, unit: 1, epoch: 2, limit: 6 } => [1, 1, 1, 2, 6], fds 3;
        CustodyAnswer::Lent { serial: 7, lease: 5, bytes: 6, more: true } => [2, 7, 5, 6, 1], fds 1;
        CustodyAnswer::Granted { serial: 7, value: 8 } => [3, 7, 8], fds 0;
        CustodyAnswer::Refused { serial: 7, error: 2 } => [4, 7, 2], fds 0;
        CustodyAnswer::Recall { bytes: 6 } => [5, 6], fds 0;
        CustodyAnswer::Process { serial: 7, process: 9, bytes: 6 } => [6, 7, 9, 6], fds 0;
    }
    golden! { ToArbiter:
        ToArbiter::Vm { vm: 1, epoch: 2, limit: 6, guaranteed: 5, headroom: 4, pinned: 3, ancestors: 0 }
            => [1, 1, 2, 6, 5, 4, 3, 0], fds 0;
        ToArbiter::Worker { vm: 1, epoch: 2, process: 9, session: 3, user: 4, grouped: true } => [2, 1, 2, 9, 3, 4, 1], fds 3;
        ToArbiter::Escrow { ancestor: 1, bytes: 6 } => [3, 1, 6], fds 0;
        ToArbiter::Fence { vm: 1, epoch: 2 } => [4, 1, 2], fds 0;
        ToArbiter::Forget { vm: 1, epoch: 2 } => [5, 1, 2], fds 0;
        ToArbiter::DescribeVm { serial: 7, vm: 1 } => [6, 7, 1], fds 0;
        ToArbiter::DescribeUnit { serial: 7 } => [7, 7], fds 0;
        ToArbiter::Inventory {} => [8], fds 1;
        ToArbiter::TimeShare {
            vm: 1,
            epoch: 2,
            share: TimeShare { weight: 100, priority: Priority::High, cap: 500, guarantee: 250, hang: 9 },
        } => [9, 1, 2, 100, 2, 500, 250, 9], fds 0;
        ToArbiter::Probe {} => [10], fds 0;
        ToArbiter::Prober { process: 9, grouped: false } => [11, 9, 0], fds 2;
    }
    golden! { FromArbiter:
        FromArbiter::Ready { bytes: 6, context: 5, margin: 4, host_access: HostAccess::HostPageTables }
            => [1, 6, 5, 4, 2], fds 0;
        FromArbiter::Vm { serial: 7, vm: 1, epoch: 2, lent: 6, headroom: 5, dirty: 4, holders: 3 }
            => [2, 7, 1, 2, 6, 5, 4, 3], fds 0;
        FromArbiter::Unit {
            serial: 7, memory: UnitBytes { total: 6, lent: 5, clean: 4, dirty: 3, headroom: 2, suspect: 1 }
        } => [3, 7, 6, 5, 4, 3, 2, 1], fds 0;
        FromArbiter::WantEscrow { ancestor: 1, bytes: 6 } => [4, 1, 6], fds 0;
        FromArbiter::Event { kind: ArbiterEvent::Leak as u32, vm: 1, process: 9, bytes: 6 } => [5, 4, 1, 9, 6], fds 0;
        FromArbiter::Time { vm: 1, epoch: 2, time: VmTime { used: 6, overlapped: 5, waited: 4, turns: 3 } }
            => [6, 1, 2, 6, 5, 4, 3], fds 0;
        FromArbiter::Work { vm: 1, epoch: 2, work: WorkCounts { launches: 6, copies: 5, copied: 4, calls: 3 } }
            => [7, 1, 2, 6, 5, 4, 3], fds 0;
        FromArbiter::Pinned { vm: 1, epoch: 2, bytes: 6 } => [8, 1, 2, 6], fds 0;
        FromArbiter::Upkeep {
            upkeep: Upkeep { scrubs: 6, scrubbed: 5, took: 4, drift: 3 }, figures: Figures::Unused
        } => [9, 6, 5, 4, 3, 2], fds 0;
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
        FromInventory::Device { serial: 7, uuid: UUID, memory: 6, multiprocessors: 5, node: 1, pci: PCI }
            => [6, 7, 0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908, 6, 5, 1, 0x1_0000_6507], fds 0;
        FromInventory::Name { serial: 7, text: NamePart::part("GPU", 0) } => [7, 7, 0x0055_5047], fds 0;
        FromInventory::Health {
            serial: 7, mig: Switch::On, pending: Switch::Off, ecc: Switch::Absent, recovery: Recovery::Reset,
            uncorrected: 6, repair: true
        } => [8, 7, 1, 0, 2, 1, 6, 1], fds 0;
        FromInventory::Utilization { serial: 7, gpu: 50, memory: 25 } => [9, 7, 50, 25], fds 0;
        FromInventory::Profile {
            serial: 7,
            profile: InstanceProfile {
                id: 19, slices: 1, instances: 7, multiprocessors: 16, memory: 6, capabilities: 1,
                engines: Engines { copy: 1, decoder: 2, encoder: 3, jpeg: 4, ofa: 5 },
            }
        } => [10, 7, 1 << 32 | 19, 16 << 32 | 7, 6, 1, 0x05_0403_0201], fds 0;
        FromInventory::Places {
            serial: 7, places: InstancePlaces::new(&[InstancePlace { start: 1, size: 2 }, InstancePlace { start: 4, size: 3 }]).unwrap()
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
        driver_queue: 9,
        devices: 0,
        scrub_every_free: false,
        identity: Some(UUID),
    }
}

// Promise: V6, F62
#[test]
fn worker_setup_matches_its_golden_bytes_and_other_lengths_are_refused() {
    let golden = [
        &[1, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0][..],
        b"/d.so",
        &[7, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
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
    // An impossible length is refused before memory is allocated for it.
    for length in [6u64, 1 << 20, u64::MAX] {
        let mut forged = golden.clone();
        forged[12..20].copy_from_slice(&length.to_le_bytes());
        assert!(codec::decode::<WorkerSetup>(&forged).is_err(), "{length:#x}");
    }
    let mut not_text = golden.clone();
    not_text[20] = 0xff;
    assert!(codec::decode::<WorkerSetup>(&not_text).is_err());
    // Bytes of another version are not interpreted at all.
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
fn setup_longer_than_a_message_is_not_encoded() {
    let long = |bytes| WorkerSetup { driver: "x".repeat(bytes), ..setup() };
    let overhead = codec::encode(&long(0)).unwrap().len();
    let fits = long(control::SETUP_BYTES - overhead);
    assert_eq!(codec::decode::<WorkerSetup>(&codec::encode(&fits).unwrap()).unwrap(), fits);
    assert!(codec::encode(&long(control::SETUP_BYTES - overhead + 1)).is_err());
}
