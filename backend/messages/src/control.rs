//! Messages between backend processes.
//!
//! Every socket between two processes is a Unix SEQPACKET socket for one authority; descriptors flow down, requests flow up.
//! Messages are fixed-size: 64 bytes, a type word and scalars, with a fixed number of descriptors each. A message from a worker
//! or a device is hostile (either may have been taken over by a guest), so nothing in it has a length. The one variable
//! message, [`WorkerSetup`], goes down only.

use crate::inventory::{Instance, Name, Places, Profile, Recovery, Switch, Visible};
use sluice_protocol::field::{Field, FieldError, Reader, Writer};

/// Bytes of a fixed-size message.
pub const BYTES: usize = 64;
/// Bytes of the longest setup.
pub const SETUP_BYTES: usize = 64 << 10;

/// The version of all that processes of one host share: these messages, those of [`crate::custody`], and the pages behind them.
/// It grows when any of that changes. Every socket's first message carries it, or the command line of the process at its
/// end: whoever begins refuses another one, so that nothing is ever misread.
pub const VERSION: u32 = 1;

/// Stands for the user of a process of a VM: its own system tells its users apart. Of a program of the host it is the user whom the
/// kernel names.
pub const NO_USER: u32 = u32::MAX;

/// The other end is of another version of Sluice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the other end speaks version {theirs} of Sluice's messages, and this program version {VERSION}")]
pub struct VersionError {
    /// What the other end speaks.
    pub theirs: u32,
}

/// Checks the version of the other end.
///
/// # Errors
/// When it is another one than ours.
pub const fn same_version(theirs: u32) -> Result<(), VersionError> {
    if theirs == VERSION { Ok(()) } else { Err(VersionError { theirs }) }
}

/// What the option `--messages` takes, by which a process is told what whoever starts it speaks.
///
/// # Errors
/// When that is no number, or another one than ours.
pub fn version_of_option(text: &str) -> Result<u32, String> {
    let theirs = text.parse().map_err(|_| format!("{text:?} is no version"))?;
    same_version(theirs).map(|()| theirs).map_err(|error| error.to_string())
}

macro_rules! messages {
    ($($(#[$edoc:meta])* enum $enum:ident $(begins $first:ident)? { $($(#[$doc:meta])* $tag:literal $name:ident { $($(#[$fdoc:meta])* $field:ident: $ty:ty),* } fds $fds:literal,)+ })+) => {$(
        $(#[$edoc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $enum {
            $($(#[$doc])* $name { $($(#[$fdoc])* $field: $ty),* },)+
        }

        impl $enum {
            /// The message's bytes.
            #[must_use]
            pub fn encode(&self) -> [u8; $crate::control::BYTES] {
                let mut bytes = [0; $crate::control::BYTES];
                let mut writer = Writer::new(&mut bytes);
                let written = match self {
                    $($enum::$name { $($field),* } => {
                        (|| { writer.word($tag)?; $($field.put(&mut writer)?;)* Ok::<(), FieldError>(()) })()
                    })+
                };
                debug_assert!(written.is_ok(), "a message has at most seven fields");
                bytes
            }

            /// Decodes a message.
            ///
            /// # Errors
            /// [`FieldError`] when the bytes are none of these.
            pub fn decode(bytes: &[u8]) -> Result<$enum, FieldError> {
                if bytes.len() != $crate::control::BYTES {
                    return Err(FieldError::Short);
                }
                let mut reader = Reader::new(bytes);
                match reader.word()? {
                    $($tag => Ok($enum::$name { $($field: <$ty as Field>::get(&mut reader)?),* }),)+
                    _ => Err(FieldError::Range),
                }
            }

            /// Descriptors that come with the message.
            #[must_use]
            pub const fn descriptors(&self) -> usize {
                match self {
                    $($enum::$name { .. } => $fds,)+
                }
            }
        }

        impl $crate::channel::Message for $enum {
            fn encode(&self) -> [u8; $crate::control::BYTES] {
                self.encode()
            }

            fn decode(bytes: &[u8]) -> Result<Self, FieldError> {
                $enum::decode(bytes)
            }

            fn descriptors(&self) -> usize {
                self.descriptors()
            }

            fn version(&self) -> Option<u32> {
                match self {
                    $($enum::$first { version, .. } => Some(*version),)?
                    _ => None,
                }
            }
        }
    )+};
}
pub(crate) use messages;

messages! {
    /// From the device to a worker.
    enum ToWorker begins Begin {
        /// The session begins. Descriptors: the reading end of the doorbell pipe (the worker waits on it), wake
        /// eventfd (the worker writes it).
        1 Begin {
            /** [`VERSION`]; first in every one. */ version: u32,
            /** The device's number of the session. */ session: u32
        } fds 2,
        /// Map guest pages. Descriptors: a memfd of runs (`sluice_shared_memory::Run`), the memory file they lie in. The first runs are the parts of
        /// the file that are the guest's memory, in ascending order; the others are the pages.
        2 Attach {
            /** Entry of the attach table; 0 is the control resource. */ slot: u32,
            /** Where to map; 0 for the control resource, whose place is the worker's choice. */ address: u64,
            /** Bytes in all. */ bytes: u64,
            /** Number of runs in the memfd that are pages. */ runs: u32,
            /** Number of runs before them that are parts of the file. */ extents: u32,
            /** Bytes of the file's own pages: more than 4096 for huge ones. */ granule: u64,
            /** Whether more messages for the same slot follow, with the runs of further regions. */ more: bool
        } fds 2,
        /// Unmap what is attached in a slot, then say so.
        3 Detach { /** Entry of the attach table. */ slot: u32 } fds 0,
        /// From `sluiced`, before the session begins: who lends the memory of a device. Descriptor: a socket to its arbiter.
        4 Custody { /** Ordinal of the device. */ device: u32 } fds 1,
    }
    /// From a worker to the device.
    enum FromWorker {
        /// The pages are mapped (`error` 0) or not (a CUresult).
        1 Attached { /** Entry of the attach table. */ slot: u32, /** A CUresult. */ error: u32 } fds 0,
        /// The pages are unmapped and no DMA can reach them.
        2 Detached { /** Entry of the attach table. */ slot: u32 } fds 0,
    }
    /// From a device to `sluiced`.
    enum FromDevice {
        /// A guest process wants a worker.
        1 WorkerWanted {
            /** The device's number of the session. */ session: u32,
            /** Whose process it is, as [`NO_USER`] says. */ user: u32
        } fds 0,
        /// The session's worker is reaped.
        2 SessionEnded { /** The device's number of the session. */ session: u32 } fds 0,
    }
    /// From `sluiced` to a device.
    enum ToDevice {
        /// A worker. Descriptors: its control socket, its pidfd.
        1 Worker { /** The device's number of the session. */ session: u32 } fds 2,
        /// No worker can be had; `error` is the CUresult for the guest.
        2 NoWorker { /** The device's number of the session. */ session: u32, /** A CUresult. */ error: u32 } fds 0,
        /// From a `sluiced` that follows another: what was asked for and has not come is to be asked for again.
        3 Resume {} fds 0,
    }
    /// From `sluiced` to the launcher.
    enum ToLauncher {
        /// Start a worker for a session of a VM.
        1 StartWorker {
            /** The VM. */ vm: u32,
            /** The session. */ session: u32,
            /** Which devices its driver shows it. */ visible: Visible
        } fds 0,
        /// Start the device of a VM. What the launcher's own command line says of a VM holds instead of what is said here.
        2 StartDevice { /** The VM. */ vm: u32, /** Displays, 0 or 1. */ scanouts: u32, /** Whether programs of this host connect to it. */ direct: bool } fds 0,
        /// Start the arbiter of a placement unit.
        3 StartArbiter { /** The unit. */ unit: u32, /** Which device its driver shows it. */ visible: Visible } fds 0,
        /// Start the inventory.
        4 StartInventory {} fds 0,
        /// From a `sluiced` that follows another: answered by `Settled`, behind the answers to all that the other has asked.
        5 Settle {} fds 0,
        /// A worker that an earlier launcher has started, and that goes on. To a new launcher, before `Sweep`; not answered.
        6 KeepWorker {
            /** The process. */ process: u32,
            /** When it was started, in ticks since the machine was: numbers are used again. */ started: u64
        } fds 0,
        /// Every worker that goes on has been named: what else an earlier launcher has left in cgroups is to end. Not answered.
        7 Sweep {} fds 0,
        /// End a worker that belongs to no session. Answered by `Ended`, or by `Failed` where it is no worker that the launcher has
        /// started or was told to keep: then nothing happens.
        8 EndWorker {
            /** The process. */ process: u32,
            /** When it was started, in ticks since the machine was. */ started: u64
        } fds 0,
        /// Start a probe of a placement unit: a worker that serves no session, and that its arbiter lends memory to.
        9 StartProbe { /** The unit. */ unit: u32, /** Which device its driver shows it. */ visible: Visible } fds 0,
    }
    /// From `sluiced` to an arbiter, after its [`ArbiterSetup`].
    enum ToArbiter {
        /// A VM may have memory of the unit; or what it may have changes. A VM of an older epoch is another one.
        1 Vm {
            /** The VM. */ vm: u32,
            /** Its epoch; grows with every re-admission. */ epoch: u64,
            /** Its quota: bytes of chunks and of what drivers take for it; 0 for all of the unit. */ limit: u64,
            /** Of these, bytes that are kept for it; the rest it has while nobody else does. */ guaranteed: u64,
            /** Bytes beside the quota, to which what drivers take is charged first. */ headroom: u64,
            /** Bytes of guest memory it may have pinned; 0 for no limit. */ pinned: u64,
            /** Its project in the low half, its organisation in the high half; 0 for none. */ ancestors: u64
        } fds 0,
        /// A worker of a VM. Descriptors: the arbiter's end of its custody socket, its pidfd.
        2 Worker {
            /** The VM. */ vm: u32,
            /** The epoch it was started in; an old one is dropped and counted. */ epoch: u64,
            /** Its process id, as the inventory lists it. */ process: u32,
            /** Its session, for logs. */ session: u32,
            /** Whose process it serves, as [`NO_USER`] says. */ user: u32
        } fds 2,
        /// What an ancestor may have on this unit from now on. Never taken below what is lent: then it holds as soon as it can.
        3 Escrow { /** The project or organisation. */ ancestor: u32, /** Bytes in all. */ bytes: u64 } fds 0,
        /// The VM gets nothing any more: leases are refused, permits are closed.
        4 Fence { /** The VM. */ vm: u32, /** Its epoch. */ epoch: u64 } fds 0,
        /// The VM is gone: its memory goes back to the unit once it is clean, then it is forgotten.
        5 Forget { /** The VM. */ vm: u32, /** Its epoch. */ epoch: u64 } fds 0,
        /// Answered by `Vm`.
        6 DescribeVm { /** The VM. */ vm: u32 } fds 0,
        /// Answered by `Unit`.
        7 DescribeUnit {} fds 0,
        /// Who lists the driver's processes. Descriptor: a socket to the inventory; it replaces one that was there.
        8 Inventory {} fds 1,
        /// What a VM may have of the unit's time. Until it is said, it has [`Shares::default`].
        9 Shares {
            /** The VM. */ vm: u32,
            /** Its epoch. */ epoch: u64,
            /** See [`Shares::weight`]. */ weight: u32,
            /** A [`Priority`]. */ priority: u32,
            /** See [`Shares::cap`]. */ cap: u32,
            /** See [`Shares::guarantee`]. */ guarantee: u32,
            /** See [`Shares::hang`]. */ hang: u32
        } fds 0,
        /// Try whether the device works. Not answered when it does; else an event says [`ArbiterEvent::ProbeFailed`].
        10 Probe {} fds 0,
        /// A probe, by which the arbiter is to find out its [`Figures`]. Descriptors: the arbiter's end of its custody socket, its
        /// pidfd. Whatever comes of it, the arbiter ends it.
        11 Prober { /** Its process id, as the inventory lists it. */ process: u32 } fds 2,
    }
    /// From an arbiter to `sluiced`.
    enum FromArbiter {
        /// The unit's memory is taken and lending begins.
        1 Ready {
            /** Bytes that can be lent. */ bytes: u64,
            /** Bytes of the unit that a context takes for itself, as measured. */ context: u64,
            /** Bytes that a driver may take beside what it asked for. */ margin: u64
        } fds 0,
        /// What a VM has.
        2 Vm {
            /** The VM. */ vm: u32,
            /** Its epoch. */ epoch: u64,
            /** Bytes lent to it. */ lent: u64,
            /** Bytes that drivers take for it, as charged. */ headroom: u64,
            /** Bytes that it gave back and that are not clean yet. */ dirty: u64,
            /** Its workers that are not known to be gone from the driver. */ holders: u32
        } fds 0,
        /// What a unit has.
        3 Unit {
            /** Bytes in custody. */ total: u64,
            /** Of these, lent. */ lent: u64,
            /** Of these, clean. */ clean: u64,
            /** Of these, waiting to be scrubbed. */ dirty: u64,
            /** Of these, released for the driver to grow into. */ headroom: u64,
            /** Of these, not proven clean after all tries, and never lent again. */ suspect: u64
        } fds 0,
        /// An ancestor's escrow does not suffice.
        4 WantEscrow { /** The project or organisation. */ ancestor: u32, /** Bytes in all that would. */ bytes: u64 } fds 0,
        /// Something an operator should know of.
        5 Event {
            /** An [`ArbiterEvent`]. */ kind: u32,
            /** The VM it is about; 0 for none. */ vm: u32,
            /** The process it is about; 0 for none. */ process: u32,
            /** Bytes it is about. */ bytes: u64
        } fds 0,
        /// What a VM had of the unit's time: comes before `Vm`. Nanoseconds in this epoch, none of which ever decreases.
        6 Time {
            /** The VM. */ vm: u32,
            /** Its epoch. */ epoch: u64,
            /** GPU time it is charged. */ used: u64,
            /** Of the time charged to it, what passed while others were admitted beside it. */ overlapped: u64,
            /** Time in which it had work and had to wait for its turn. */ waited: u64,
            /** How often its turn came. */ turns: u64
        } fds 0,
        /// What the workers of a VM say they have done: comes before `Vm`. In this epoch, and never less than before. A worker's
        /// word, bounded by what a device could do in that time.
        7 Work {
            /** The VM. */ vm: u32,
            /** Its epoch. */ epoch: u64,
            /** Kernels launched. */ launches: u64,
            /** Copies. */ copies: u64,
            /** Bytes of these. */ copied: u64,
            /** Calls of the guest that came as far as a worker. */ calls: u64
        } fds 0,
        /// What of a VM's guest memory its workers have pinned: comes before `Vm`.
        8 Pinned { /** The VM. */ vm: u32, /** Its epoch. */ epoch: u64, /** Bytes. */ bytes: u64 } fds 0,
        /// Counts the scrubs since the arbiter was started, and names the figures that it uses. Comes before `Unit`.
        9 Upkeep {
            /** Chunks that were scrubbed. */ scrubs: u64,
            /** Bytes of these. */ scrubbed: u64,
            /** Nanoseconds that took. */ took: u64,
            /** Bytes by which the driver's figure is another than the ledger's, as last compared; 0 while that is normal. */ drift: u64,
            /** Whether growth is charged by the driver's bytes per process. */ figures: Figures
        } fds 0,
    }
    /// From `sluiced` or an arbiter to the inventory.
    enum ToInventory {
        /// How many devices there are. Answered by `Units`.
        1 Units { /** Comes back in the answer. */ serial: u64 } fds 0,
        /// The memory of a device or an instance. Answered by `Memory`.
        2 Memory {
            /** Comes back in the answer. */ serial: u64,
            /** Ordinal of the device. */ unit: u32,
            /** The GPU instance, or [`WHOLE`](crate::inventory::WHOLE). */ instance: u32
        } fds 0,
        /// Whether the driver lists a process there. Answered by `Process`.
        3 Process {
            /** Comes back in the answer. */ serial: u64,
            /** Ordinal of the device. */ unit: u32,
            /** The process. */ process: u32,
            /** The GPU instance, or [`WHOLE`](crate::inventory::WHOLE). */ instance: u32
        } fds 0,
        /// The `index`-th process that the driver lists there. Answered by `Process`, behind the last one with process 0.
        4 Nth {
            /** Comes back in the answer. */ serial: u64,
            /** Ordinal of the device. */ unit: u32,
            /** From 0. */ index: u32,
            /** The GPU instance, or [`WHOLE`](crate::inventory::WHOLE). */ instance: u32
        } fds 0,
        /// Another client. Descriptor: its socket. From `sluiced` only.
        5 Client {} fds 1,
        /// What a device is. Answered by `Device`.
        6 Device { /** Comes back in the answer. */ serial: u64, /** Ordinal of the device. */ unit: u32 } fds 0,
        /// What a device is called. Answered by `Name`.
        7 DeviceName {
            /** Comes back in the answer. */ serial: u64,
            /** Ordinal of the device. */ unit: u32,
            /** Which part of the name, from 0. */ part: u32
        } fds 0,
        /// How a device is. Answered by `Health`.
        8 Health { /** Comes back in the answer. */ serial: u64, /** Ordinal of the device. */ unit: u32 } fds 0,
        /// How busy a device or an instance is. Answered by `Utilization`.
        9 Utilization {
            /** Comes back in the answer. */ serial: u64,
            /** Ordinal of the device. */ unit: u32,
            /** The GPU instance, or [`WHOLE`](crate::inventory::WHOLE). */ instance: u32
        } fds 0,
        /// The `index`-th kind of instance that a device can be divided into. Answered by `Profile`, behind the last by `Nothing`.
        10 Profile { /** Comes back in the answer. */ serial: u64, /** Ordinal of the device. */ unit: u32, /** From 0. */ index: u32 } fds 0,
        /// What a kind of instance is called. Answered by `Name`.
        11 ProfileName {
            /** Comes back in the answer. */ serial: u64,
            /** Ordinal of the device. */ unit: u32,
            /** The profile's id. */ profile: u32,
            /** Which part of the name, from 0. */ part: u32
        } fds 0,
        /// Where instances of a kind can be. Answered by `Places`; a driver may list none while there are as many as there can be.
        12 Places {
            /** Comes back in the answer. */ serial: u64,
            /** Ordinal of the device. */ unit: u32,
            /** The profile's id. */ profile: u32
        } fds 0,
        /// How many more instances of a kind could be made now, by the driver's own count. Answered by `Capacity`.
        13 Capacity {
            /** Comes back in the answer. */ serial: u64,
            /** Ordinal of the device. */ unit: u32,
            /** The profile's id. */ profile: u32
        } fds 0,
        /// The `index`-th instance that there is, whoever made it. Answered by `Instance`, behind the last one by `Nothing`.
        14 Instance { /** Comes back in the answer. */ serial: u64, /** Ordinal of the device. */ unit: u32, /** From 0. */ index: u32 } fds 0,
        /// Make an instance with one compute instance that is all of it. Answered by `Instance`. From `sluiced` only.
        15 Create {
            /** Comes back in the answer. */ serial: u64,
            /** Ordinal of the device. */ unit: u32,
            /** The profile's id. */ profile: u32,
            /** Its first memory slice. */ start: u32,
            /** Its memory slices. */ size: u32
        } fds 0,
        /// Unmake an instance and what is in it. One that is not exactly as said here is left alone, and the answer is
        /// `NVML_ERROR_NOT_FOUND`. Answered by `Done`. From `sluiced` only.
        16 Destroy {
            /** Comes back in the answer. */ serial: u64,
            /** Ordinal of the device. */ unit: u32,
            /** The GPU instance's id. */ instance: u32,
            /** The profile's id. */ profile: u32,
            /** Its first memory slice. */ start: u32,
            /** Its memory slices. */ size: u32
        } fds 0,
        /// Switch division into instances on or off; `Health` says what became of it. Answered by `Done`. From `sluiced` only.
        17 SetMig { /** Comes back in the answer. */ serial: u64, /** Ordinal of the device. */ unit: u32, /** Whether on. */ on: bool } fds 0,
    }
    /// From the inventory.
    enum FromInventory {
        /// How many devices there are.
        1 Units { /** That of the request. */ serial: u64, /** Devices. */ count: u32 } fds 0,
        /// Memory in bytes, as the driver counts it.
        2 Memory { /** That of the request. */ serial: u64, /** All. */ total: u64, /** Used. */ used: u64, /** Free. */ free: u64 } fds 0,
        /// A process on a device.
        3 Process {
            /** That of the request. */ serial: u64,
            /** The process. */ process: u32,
            /** Whether the driver lists it. */ present: bool,
            /** Bytes the driver books to it; 0 where it says none. */ bytes: u64,
            /** Percent of the time lately for which kernels of it ran; `u32::MAX` where the driver does not say, or was asked for that process only. */ busy: u32
        } fds 0,
        /// The driver's management library does not answer this.
        4 Failed { /** That of the request. */ serial: u64, /** An nvmlReturn_t. */ error: u32 } fds 0,
        /// The driver reports an error of a device. To `sluiced` only.
        5 Xid {
            /** Ordinal of the device. */ unit: u32,
            /** The Xid. */ xid: u32,
            /** The process, if known; else 0. */ process: u32,
            /** The GPU instance, if the driver says one; else [`WHOLE`](crate::inventory::WHOLE). */ instance: u32
        } fds 0,
        /// What a device is.
        6 Device {
            /** That of the request. */ serial: u64,
            /** Its UUID. */ uuid: [u8; 16],
            /** Bytes of its memory. */ memory: u64,
            /** Its multiprocessors; 0 where the driver does not say. */ multiprocessors: u32,
            /** The NUMA node of the host that it is near; `u32::MAX` where that is not known. */ node: u32,
            /** Its place on the bus: domain, and behind it 8 bits each of bus and device. */ pci: u64
        } fds 0,
        /// A part of a name.
        7 Name { /** That of the request. */ serial: u64, /** The part. */ text: Name } fds 0,
        /// How a device is.
        8 Health {
            /** That of the request. */ serial: u64,
            /** Whether it is divided into instances. */ mig: Switch,
            /** The same, from its next reset on. */ pending: Switch,
            /** Whether its memory corrects errors. */ ecc: Switch,
            /** What the driver wants done about it. */ recovery: Recovery,
            /** Errors of its memory since the driver started that were not corrected; `u64::MAX` where nobody counts. */ uncorrected: u64,
            /** Whether memory waits for a reset to be taken out of use. */ repair: bool
        } fds 0,
        /// How busy, in percent of the time since the last question.
        9 Utilization { /** That of the request. */ serial: u64, /** Kernels. */ gpu: u32, /** Memory. */ memory: u32 } fds 0,
        /// A kind of instance.
        10 Profile { /** That of the request. */ serial: u64, /** It. */ profile: Profile } fds 0,
        /// Where instances of a kind can be.
        11 Places { /** That of the request. */ serial: u64, /** All of them. */ places: Places } fds 0,
        /// How many more instances of a kind could be made.
        12 Capacity { /** That of the request. */ serial: u64, /** Instances. */ count: u32 } fds 0,
        /// An instance.
        13 Instance { /** That of the request. */ serial: u64, /** It. */ instance: Instance } fds 0,
        /// There is none of that number.
        14 Nothing { /** That of the request. */ serial: u64 } fds 0,
        /// It is done.
        15 Done { /** That of the request. */ serial: u64 } fds 0,
    }
    /// From the launcher to `sluiced`.
    enum FromLauncher {
        /// A process runs. Descriptors: its control socket, its pidfd.
        1 Started { /** Its process id. */ process: u32 } fds 2,
        /// It could not be done; `error` is an errno.
        2 Failed { /** An errno. */ error: u32 } fds 0,
        /// Everything that was asked before `Settle` has been answered.
        3 Settled {} fds 0,
        /// The worker of `EndWorker` is killed.
        4 Ended {} fds 0,
    }
}

/// What a worker is told before anything else, by `sluiced`, on the socket that then belongs to the device.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct WorkerSetup {
    /// The VM, for logs.
    pub vm: u32,
    /// The session, for logs.
    pub session: u32,
    /// Absolute path of the driver library to load.
    pub driver: String,
    /// Runs of guest pages the worker maps one by one; what goes beyond is gathered.
    pub mapped_runs: u32,
    /// How many [`ToWorker::Custody`] messages follow: devices, in order of their ordinals. There are no others.
    pub devices: u32,
    /// Whether memory is also cleared each time a guest's allocation is freed, before anything else gets it.
    pub scrub_every_free: bool,
    /// The UUID of the only device that the driver must show; `None` where it may show any.
    pub identity: Option<[u8; 16]>,
}

/// What an arbiter is told before anything else, by `sluiced`.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ArbiterSetup {
    /// The placement unit, for logs.
    pub unit: u32,
    /// Absolute path of the driver library to load.
    pub driver: String,
    /// Ordinal of the device, as the driver shows it to the arbiter.
    pub device: u32,
    /// The UUID of the only device that the driver must show; `None` where it may show any.
    pub identity: Option<[u8; 16]>,
    /// Ordinal of the device, as the inventory counts it.
    pub listed: u32,
    /// The GPU instance that the unit is, or [`WHOLE`](crate::inventory::WHOLE).
    pub instance: u32,
    /// How much of what is scrubbed is read back.
    pub verify: Verify,
    /// Whether memory is scrubbed at all. Without it remnants reach other tenants: for the positive control of tests only.
    pub scrub: bool,
    /// Bytes left to the driver beside what contexts take.
    pub reserve: u64,
    /// Bytes of each file for receipts of scrubs; the files come with the message.
    pub receipts: u64,
}

/// How much of what is scrubbed is read back before it counts as clean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum Verify {
    /// Samples of each chunk.
    Sampled,
    /// Every byte.
    All,
}

/// What a VM may have of a unit's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shares {
    /// Its part relative to the weights of others that have work at the same time; 1 to [`sluice_protocol::limits::WEIGHT`].
    pub weight: u32,
    /// Whose work goes first.
    pub priority: Priority,
    /// Thousandths of the unit's time that it never exceeds in the long run, also where nobody else wants them; 1000 for all.
    pub cap: u32,
    /// Thousandths of the unit's time that it has whenever it has work, whatever weights and priorities say.
    pub guarantee: u32,
    /// Milliseconds after which work of which nothing ends makes its worker be ended; 0 for never.
    pub hang: u32,
}

impl Default for Shares {
    fn default() -> Shares {
        Shares { weight: 100, priority: Priority::Normal, cap: 1000, guarantee: 0, hang: 0 }
    }
}

/// Whose work goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum Priority {
    /// What others leave.
    Low = 0,
    /// As most.
    #[default]
    Normal = 1,
    /// Before all others.
    High = 2,
}

impl Priority {
    /// The priority with this number.
    #[must_use]
    pub const fn from_number(number: u32) -> Option<Priority> {
        match number {
            0 => Some(Priority::Low),
            1 => Some(Priority::Normal),
            2 => Some(Priority::High),
            _ => None,
        }
    }
}

/// Whether an arbiter uses the driver's bytes per process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Figures {
    /// No probe has shown it yet.
    #[default]
    Unknown,
    /// A probe has shown to whom lent memory is booked.
    Used,
    /// There are none, or a probe has shown that nothing follows from them.
    Unused,
}

impl<'a> Field<'a> for Figures {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        writer.word(*self as u64)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        match reader.word()? {
            0 => Ok(Figures::Unknown),
            1 => Ok(Figures::Used),
            2 => Ok(Figures::Unused),
            _ => Err(FieldError::Range),
        }
    }
}

/// What an arbiter reports: kinds of [`FromArbiter::Event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ArbiterEvent {
    /// A worker broke the custody protocol and was ended.
    Abuse = 1,
    /// The ledger's sums or states contradict each other.
    LedgerBroken = 2,
    /// The inventory and the ledger differ by more than is normal.
    Drift = 3,
    /// A chunk was lent to nobody who lives; it was taken back.
    Leak = 4,
    /// A chunk was not clean after scrubbing.
    ScrubFailed = 5,
    /// A process uses the device that is no worker.
    Stranger = 6,
    /// A worker's driver took more than the VM's limit for it.
    Headroom = 7,
    /// A worker was killed and the driver still lists it after a long time.
    Stuck = 8,
    /// A worker has taken memory again and again over a long time and given nothing back.
    Growing = 9,
    /// Of a worker's work nothing ended for so long that it was ended.
    Hung = 10,
    /// The driver saw a VM use more of the device's time than it is charged.
    Undercharged = 11,
    /// The device failed the arbiter's own probe of it, or did not end it in time; the arbiter ends.
    ProbeFailed = 12,
    /// Receipts of scrubs could not be written: as many as the event has bytes.
    ReceiptsLost = 20,
}

impl ArbiterEvent {
    /// The event with this number.
    #[must_use]
    pub const fn from_number(number: u32) -> Option<ArbiterEvent> {
        Some(match number {
            1 => ArbiterEvent::Abuse,
            2 => ArbiterEvent::LedgerBroken,
            3 => ArbiterEvent::Drift,
            4 => ArbiterEvent::Leak,
            5 => ArbiterEvent::ScrubFailed,
            6 => ArbiterEvent::Stranger,
            7 => ArbiterEvent::Headroom,
            8 => ArbiterEvent::Stuck,
            9 => ArbiterEvent::Growing,
            10 => ArbiterEvent::Hung,
            11 => ArbiterEvent::Undercharged,
            12 => ArbiterEvent::ProbeFailed,
            20 => ArbiterEvent::ReceiptsLost,
            _ => return None,
        })
    }
}

/// The one place where bincode is used: messages that go down, and are the first on their sockets. Before each stands
/// [`VERSION`], so that what follows is only ever read as what it is.
pub mod codec {
    use super::{SETUP_BYTES, VERSION, VersionError, same_version};

    const CONFIGURATION: bincode::config::Configuration<
        bincode::config::LittleEndian,
        bincode::config::Fixint,
        bincode::config::Limit<{ SETUP_BYTES }>,
    > = bincode::config::standard().with_fixed_int_encoding().with_limit::<{ SETUP_BYTES }>();

    /// A message cannot be coded.
    #[derive(Debug, thiserror::Error)]
    pub enum CodecError {
        /// Too long.
        #[error("cannot encode: {0}")]
        Encode(#[from] bincode::error::EncodeError),
        /// Malformed.
        #[error("cannot decode: {0}")]
        Decode(#[from] bincode::error::DecodeError),
        /// Longer than its content.
        #[error("{0} bytes after the message")]
        Trailing(usize),
        /// Of another version.
        #[error(transparent)]
        Version(#[from] VersionError),
    }

    /// Encodes a message.
    ///
    /// # Errors
    /// When it is longer than [`SETUP_BYTES`].
    pub fn encode(message: &impl bincode::Encode) -> Result<Vec<u8>, CodecError> {
        // The configuration's limit holds for decoding only.
        let bytes = bincode::encode_to_vec((VERSION, message), CONFIGURATION)?;
        if bytes.len() > SETUP_BYTES {
            return Err(bincode::error::EncodeError::Other("longer than a message").into());
        }
        Ok(bytes)
    }

    /// Decodes a message, all of it.
    ///
    /// # Errors
    /// When the bytes are not exactly one such message.
    pub fn decode<T: bincode::Decode<()>>(bytes: &[u8]) -> Result<T, CodecError> {
        let (version, before): (u32, usize) = bincode::decode_from_slice(bytes, CONFIGURATION)?;
        same_version(version)?;
        let bytes = bytes.get(before..).unwrap_or_default();
        let (message, read) = bincode::decode_from_slice(bytes, CONFIGURATION)?;
        match bytes.len().saturating_sub(read) {
            0 => Ok(message),
            trailing => Err(CodecError::Trailing(trailing)),
        }
    }
}
