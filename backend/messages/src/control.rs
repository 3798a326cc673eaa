//! Messages between backend processes, all in one file: a review of the privileged boundary reads one list, with its values.
//!
//! Every socket between two processes is a Unix SEQPACKET socket for one authority; descriptors flow down, requests flow up.
//! Messages are fixed-size: 64 bytes, a type word and scalars, with a fixed number of descriptors each. A message from a worker
//! or a device is hostile (either may have been taken over by a guest), so nothing in it has a length. The two variable
//! messages, [`WorkerSetup`] and [`ArbiterSetup`], go down only, each as the first of its socket.

use crate::{
    figures::{UnitBytes, Upkeep, VmTime, WorkCounts},
    inventory::{Instance, InstancePlaces, InstanceProfile, NamePart, PciAddress, Recovery, Switch, Visible},
};
use sluice_protocol::{
    field::{Field, FieldError, Reader, Writer},
    numbered,
};

/// Size of a fixed-size message, in bytes.
pub const BYTES: usize = 64;
/// Size of the longest setup, in bytes.
pub const SETUP_BYTES: usize = 64 << 10;

/// The version of everything that processes of one host share: these messages, those of [`crate::custody`], and the pages behind them.
/// It grows with every change of these after the first release. Every socket's first message carries it, or the command line of
/// the process at its end: a process refuses another version when it starts, so that no message is misread.
pub const VERSION: u32 = 1;

/// In place of the user of a process in a VM: the VM's own system separates its users. The user of a program of the host is the one that
/// the kernel reports.
pub const NO_USER: u32 = u32::MAX;

/// The other end has another version of Sluice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the other end speaks version {theirs} of Sluice's messages, this program speaks version {VERSION}")]
pub struct VersionError {
    /// The version of the other end.
    pub theirs: u32,
}

/// Checks the version of the other end.
///
/// # Errors
/// [`VersionError`] if it is not this program's version.
pub const fn same_version(theirs: u32) -> Result<(), VersionError> {
    if theirs == VERSION { Ok(()) } else { Err(VersionError { theirs }) }
}

/// Parses the option `--messages`, with which the starting process passes its version.
///
/// # Errors
/// A text for the user if it is not a number, or not this program's version.
pub fn version_of_option(text: &str) -> Result<u32, String> {
    let theirs = text.parse().map_err(|_| format!("{text:?} is not a version number"))?;
    same_version(theirs).map(|()| theirs).map_err(|error| error.to_string())
}

/// A fixed-size message with a fixed number of descriptors.
pub trait Message: Copy + core::fmt::Debug {
    /// Encodes the message.
    fn encode(&self) -> [u8; BYTES];

    /// Decodes a message.
    ///
    /// # Errors
    /// [`FieldError`] if the bytes are no such message.
    fn decode(bytes: &[u8]) -> Result<Self, FieldError>;

    /// The number of descriptors that come with the message.
    fn descriptors(&self) -> usize;

    /// The version that the message carries, if it is a socket's first.
    fn version(&self) -> Option<u32>;
}

macro_rules! messages {
    ($($(#[$edoc:meta])* enum $enum:ident $(begins $first:ident)? { $($(#[$doc:meta])* $tag:literal $name:ident { $($(#[$fdoc:meta])* $field:ident: $ty:ty),* } fds $fds:literal $(plus $more:ident)?,)+ })+) => {$(
        $(#[$edoc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $enum {
            $($(#[$doc])* $name { $($(#[$fdoc])* $field: $ty),* },)+
        }

        impl $enum {
            /// Encodes the message.
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
            /// [`FieldError`] if the bytes are no such message.
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

            /// The number of descriptors that come with the message.
            #[must_use]
            pub const fn descriptors(&self) -> usize {
                match self {
                    $($enum::$name { $($more,)? .. } => <usize>::saturating_add($fds, 0 $(| *$more as usize)?),)+
                }
            }
        }

        impl $crate::control::Message for $enum {
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
            /** [`VERSION`]; always the first field. */ version: u32,
            /** The device's number of the session. */ session: u32
        } fds 2,
        /// Map guest pages. Descriptors: a memfd of runs (`sluice_shared_memory::Run`), and the memory file with the pages. The
        /// first runs are the parts of the file that are the guest's memory, in ascending order; the others are the pages.
        2 Attach {
            /** Entry of the attach table; 0 is the control resource. */ slot: u32,
            /** The address to map at; 0 for the control resource, for which the worker chooses it. */ address: u64,
            /** Bytes in all. */ bytes: u64,
            /** Number of runs in the memfd that are pages. */ runs: u32,
            /** Number of runs before them that are parts of the file. */ extents: u32,
            /** Bytes of the file's own pages: more than 4096 for huge ones. */ granule: u64,
            /** True if more messages for the same slot follow, with the runs of further regions. */ more: bool
        } fds 2,
        /// Unmap the resource attached in a slot, then answer.
        3 Detach { /** Entry of the attach table. */ slot: u32 } fds 0,
        /// From `sluiced`, before the session begins: the arbiter of a device's memory. Descriptor: a socket to its arbiter.
        4 Custody { /** Ordinal of the device. */ device: u32 } fds 1,
    }
    /// From a worker to the device. A probe is a worker of `sluiced` itself.
    enum FromWorker {
        /// The pages are mapped (`error` 0) or not (a CUresult).
        1 Attached { /** Entry of the attach table. */ slot: u32, /** A CUresult. */ error: u32 } fds 0,
        /// The pages are unmapped and no DMA can reach them.
        2 Detached { /** Entry of the attach table. */ slot: u32 } fds 0,
        /// From a probe: the driver refuses an ability that each session needs.
        3 Unfit { /** A [`NeededAbility`]. */ ability: u32, /** A CUresult. */ error: u32 } fds 0,
        /// From a probe: the driver has every ability that a session needs.
        4 Fit {} fds 0,
    }
    /// From a device to `sluiced`.
    enum FromDevice {
        /// A guest process needs a worker.
        1 WorkerWanted {
            /** The device's number of the session. */ session: u32,
            /** The user of the process, or [`NO_USER`]. */ user: u32
        } fds 0,
        /// The session's worker is reaped.
        2 SessionEnded { /** The device's number of the session. */ session: u32 } fds 0,
    }
    /// From `sluiced` to a device.
    enum ToDevice {
        /// A worker. Descriptors: its control socket, its pidfd, and `cgroup.kill` if it is `grouped`.
        1 Worker {
            /** The device's number of the session. */ session: u32,
            /** True if it is ended by writing to the `cgroup.kill` of its own cgroup. */ grouped: bool
        } fds 2 plus grouped,
        /// There is no worker; `error` is the CUresult for the guest.
        2 NoWorker { /** The device's number of the session. */ session: u32, /** A CUresult. */ error: u32 } fds 0,
        /// From a `sluiced` that follows another: repeat the requests that have no answer.
        3 Resume {} fds 0,
    }
    /// From `sluiced` to the launcher.
    enum ToLauncher {
        /// Start a worker for a session of a VM.
        1 StartWorker {
            /** The VM. */ vm: u32,
            /** The session. */ session: u32,
            /** The devices that its driver shows it. */ visible: Visible
        } fds 0,
        /// Start the device of a VM. The launcher's own configuration of a VM, if it has one, overrides these values.
        2 StartDevice {
            /** The VM. */ vm: u32,
            /** Displays, 0 or 1. */ scanouts: u32,
            /** True if programs of this host connect to it. */ direct: bool,
            /** Bytes of the only arena of each session; 0 if arenas grow. */ fixed_arena: u64
        } fds 0,
        /// Start the arbiter of a placement unit.
        3 StartArbiter { /** The unit. */ unit: u32, /** The device that its driver shows it. */ visible: Visible } fds 0,
        /// Start the inventory.
        4 StartInventory {} fds 0,
        /// From a `sluiced` that follows another: answered by `Settled`, after the answers to all earlier requests.
        5 Settle {} fds 0,
        /// Keep a worker of an earlier launcher that continues. To a new launcher, before `Sweep`; not answered.
        6 KeepWorker {
            /** The process. */ process: u32,
            /** Its start in ticks since boot, because process numbers are reused. */ started: u64
        } fds 0,
        /// All continuing workers have been named: end every other process that an earlier launcher left in cgroups. Not answered.
        7 Sweep {} fds 0,
        /// Find a process: one that the launcher started, was told to keep, or finds in its cgroups. Answered by `Found`, or by `Refused`
        /// if it is no such process.
        8 Find { /** The process. */ process: u32 } fds 0,
        /// Start a probe of a placement unit: a worker that serves no session, and to which its arbiter lends memory.
        9 StartProbe { /** The unit. */ unit: u32, /** The device that its driver shows it. */ visible: Visible } fds 0,
        /// The first message to a launcher that is a service of its own. Answered by `Attached`, or by `Refused` if its configuration is
        /// another one: it then ends, so that the next one reads the configuration again.
        10 Attach { /** A [`Fingerprint`](crate::launch::Fingerprint) of its command line. */ configuration: [u8; 16] } fds 0,
        /// Remove the sockets of a VM that has ended. Answered by `Settled`, or by `Refused` if its device runs.
        11 RemoveSockets { /** The VM. */ vm: u32 } fds 0,
        /// End all processes that this or an earlier launcher has started: no `sluiced` knows them. Answered by `Settled`.
        12 EndAll {} fds 0,
    }
    /// From `sluiced` to an arbiter, after its [`ArbiterSetup`].
    enum ToArbiter {
        /// Gives a VM terms for memory of the unit, or changes them. A VM of an older epoch is another one.
        1 Vm {
            /** The VM. */ vm: u32,
            /** Its epoch; grows with every re-admission. */ epoch: u64,
            /** Its quota: bytes of chunks and of its driver share; 0 for all of the unit. */ limit: u64,
            /** The part of the quota that is kept for it, in bytes; the rest is shared with other VMs. */ guaranteed: u64,
            /** Bytes beside the quota, to which the driver share is charged first. */ headroom: u64,
            /** Bytes of guest memory it may have pinned; 0 for no limit. */ pinned: u64,
            /** Its project in the low half, its organisation in the high half; 0 for none. */ ancestors: u64
        } fds 0,
        /// A worker of a VM. Descriptors: the arbiter's end of its custody socket, its pidfd, and `cgroup.kill` if it is `grouped`.
        2 Worker {
            /** The VM. */ vm: u32,
            /** The epoch it was started in; an old one is dropped and counted. */ epoch: u64,
            /** Its process id, as the inventory lists it. */ process: u32,
            /** Its session, for logs. */ session: u32,
            /** The user of the process that it serves, or [`NO_USER`]. */ user: u32,
            /** True if it is ended by writing to the `cgroup.kill` of its own cgroup. */ grouped: bool
        } fds 2 plus grouped,
        /// Sets an ancestor's escrow on this unit. It is never set below the lent bytes: then it takes effect as soon as it can.
        3 Escrow { /** The project or organisation. */ ancestor: u32, /** Bytes in all. */ bytes: u64 } fds 0,
        /// Fences a VM: it gets no more leases, and its permits are closed.
        4 Fence { /** The VM. */ vm: u32, /** Its epoch. */ epoch: u64 } fds 0,
        /// Removes a VM: its memory goes back to the unit once it is clean, then the VM is forgotten.
        5 Forget { /** The VM. */ vm: u32, /** Its epoch. */ epoch: u64 } fds 0,
        /// Requests the figures of a VM. Answered by `Vm`.
        6 DescribeVm { /** Comes back in the answer. */ serial: u64, /** The VM. */ vm: u32 } fds 0,
        /// Requests the figures of the unit. Answered by `Unit`.
        7 DescribeUnit { /** Comes back in the answer. */ serial: u64 } fds 0,
        /// Sets the inventory that lists the driver's processes. Descriptor: a socket to it, which replaces an earlier one.
        8 Inventory {} fds 1,
        /// Sets a VM's share of the unit's time. Before this, it is [`TimeShare::default`].
        9 TimeShare {
            /** The VM. */ vm: u32,
            /** Its epoch. */ epoch: u64,
            /** The share. */ share: TimeShare
        } fds 0,
        /// Test the device. Not answered if it works; otherwise there is an event [`ArbiterEvent::ProbeFailed`].
        10 Probe {} fds 0,
        /// A probe, with which the arbiter finds out its [`Figures`]. Descriptors as of `Worker`. The arbiter ends it in any case.
        11 Prober {
            /** Its process id, as the inventory lists it. */ process: u32,
            /** True if it is ended by writing to the `cgroup.kill` of its own cgroup. */ grouped: bool
        } fds 2 plus grouped,
    }
    /// From an arbiter to `sluiced`.
    enum FromArbiter {
        /// The unit's memory is taken and lending begins.
        1 Ready {
            /** Bytes that can be lent. */ bytes: u64,
            /** Bytes of the unit that a context takes for itself, as measured. */ context: u64,
            /** Bytes that a driver may take beyond its request. */ margin: u64,
            /** The host memory that kernels on it reach. */ host_access: HostAccess
        } fds 0,
        /// The memory figures of a VM.
        2 Vm {
            /** The serial of the request. */ serial: u64,
            /** The VM. */ vm: u32,
            /** Its epoch. */ epoch: u64,
            /** Bytes lent to it. */ lent: u64,
            /** Its charged driver share in bytes. */ headroom: u64,
            /** Bytes that it gave back and that are not clean yet. */ dirty: u64,
            /** Number of its workers that may still be known to the driver. */ holders: u32
        } fds 0,
        /// The memory of a unit.
        3 Unit { /** The serial of the request. */ serial: u64, /** The memory. */ memory: UnitBytes } fds 0,
        /// An ancestor's escrow does not suffice.
        4 WantEscrow { /** The project or organisation. */ ancestor: u32, /** Bytes in all that would suffice. */ bytes: u64 } fds 0,
        /// An event for operators.
        5 Event {
            /** An [`ArbiterEvent`]. */ kind: u32,
            /** The VM it is about; 0 for none. */ vm: u32,
            /** The process it is about; 0 for none. */ process: u32,
            /** Bytes it is about. */ bytes: u64
        } fds 0,
        /// A VM's use of the unit's time: comes before `Vm`.
        6 Time { /** The VM. */ vm: u32, /** Its epoch. */ epoch: u64, /** The time. */ time: VmTime } fds 0,
        /// The work of a VM: comes before `Vm`.
        7 Work { /** The VM. */ vm: u32, /** Its epoch. */ epoch: u64, /** The work. */ work: WorkCounts } fds 0,
        /// The guest memory of a VM that its workers have pinned: comes before `Vm`.
        8 Pinned { /** The VM. */ vm: u32, /** Its epoch. */ epoch: u64, /** Bytes. */ bytes: u64 } fds 0,
        /// The care for the unit's memory, and the use of the driver's figures. Comes before `Unit`.
        9 Upkeep {
            /** The care. */ upkeep: Upkeep,
            /** The use of the driver's bytes per process for charging growth. */ figures: Figures
        } fds 0,
    }
    /// From `sluiced` or an arbiter to the inventory.
    enum ToInventory {
        /// Requests the number of devices. Answered by `Units`.
        1 Units { /** Comes back in the answer. */ serial: u64 } fds 0,
        /// Requests the memory of a device or an instance. Answered by `Memory`.
        2 Memory {
            /** Comes back in the answer. */ serial: u64,
            /** Ordinal of the device. */ unit: u32,
            /** The GPU instance, or [`WHOLE`](crate::inventory::WHOLE). */ instance: u32
        } fds 0,
        /// Requests the state of one process: whether the driver lists it. Answered by `Process`.
        3 Process {
            /** Comes back in the answer. */ serial: u64,
            /** Ordinal of the device. */ unit: u32,
            /** The process. */ process: u32,
            /** The GPU instance, or [`WHOLE`](crate::inventory::WHOLE). */ instance: u32
        } fds 0,
        /// Requests the `index`-th process that the driver lists there. Answered by `Process`, behind the last one with process 0.
        4 Nth {
            /** Comes back in the answer. */ serial: u64,
            /** Ordinal of the device. */ unit: u32,
            /** The index, from 0. */ index: u32,
            /** The GPU instance, or [`WHOLE`](crate::inventory::WHOLE). */ instance: u32
        } fds 0,
        /// Brings another client. Descriptor: its socket. From `sluiced` only.
        5 Client {} fds 1,
        /// Requests the identity of a device. Answered by `Device`.
        6 Device { /** Comes back in the answer. */ serial: u64, /** Ordinal of the device. */ unit: u32 } fds 0,
        /// Requests the name of a device. Answered by `Name`.
        7 DeviceName {
            /** Comes back in the answer. */ serial: u64,
            /** Ordinal of the device. */ unit: u32,
            /** The part of the name, from 0. */ part: u32
        } fds 0,
        /// Requests the health of a device. Answered by `Health`.
        8 Health { /** Comes back in the answer. */ serial: u64, /** Ordinal of the device. */ unit: u32 } fds 0,
        /// Requests the utilization of a device or an instance. Answered by `Utilization`.
        9 Utilization {
            /** Comes back in the answer. */ serial: u64,
            /** Ordinal of the device. */ unit: u32,
            /** The GPU instance, or [`WHOLE`](crate::inventory::WHOLE). */ instance: u32
        } fds 0,
        /// Requests the `index`-th profile of a device. Answered by `Profile`, behind the last by `Nothing`.
        10 Profile { /** Comes back in the answer. */ serial: u64, /** Ordinal of the device. */ unit: u32, /** The index, from 0. */ index: u32 } fds 0,
        /// Requests the name of a profile. Answered by `Name`.
        11 ProfileName {
            /** Comes back in the answer. */ serial: u64,
            /** Ordinal of the device. */ unit: u32,
            /** The profile's id. */ profile: u32,
            /** The part of the name, from 0. */ part: u32
        } fds 0,
        /// Requests the places of instances of a profile. Answered by `Places`; a driver may list none while the largest number of
        /// instances exists.
        12 Places {
            /** Comes back in the answer. */ serial: u64,
            /** Ordinal of the device. */ unit: u32,
            /** The profile's id. */ profile: u32
        } fds 0,
        /// Requests the number of further instances of a profile that the driver would make now. Answered by `Capacity`.
        13 Capacity {
            /** Comes back in the answer. */ serial: u64,
            /** Ordinal of the device. */ unit: u32,
            /** The profile's id. */ profile: u32
        } fds 0,
        /// Requests the `index`-th existing instance of any creator. Answered by `Instance`, behind the last one by `Nothing`.
        14 Instance { /** Comes back in the answer. */ serial: u64, /** Ordinal of the device. */ unit: u32, /** The index, from 0. */ index: u32 } fds 0,
        /// Make an instance with one compute instance that is all of it. Answered by `Instance`. From `sluiced` only.
        15 Create {
            /** Comes back in the answer. */ serial: u64,
            /** Ordinal of the device. */ unit: u32,
            /** The profile's id. */ profile: u32,
            /** Its first memory slice. */ start: u32,
            /** Its memory slices. */ size: u32
        } fds 0,
        /// Remove an instance and its compute instances. An instance that is not exactly as described is left alone, and the answer is
        /// `NVML_ERROR_NOT_FOUND`. Answered by `Done`. From `sluiced` only.
        16 Destroy {
            /** Comes back in the answer. */ serial: u64,
            /** Ordinal of the device. */ unit: u32,
            /** The GPU instance's id. */ instance: u32,
            /** The profile's id. */ profile: u32,
            /** Its first memory slice. */ start: u32,
            /** Its memory slices. */ size: u32
        } fds 0,
        /// Switch division into instances on or off; `Health` shows the result. Answered by `Done`. From `sluiced` only.
        17 SetMig { /** Comes back in the answer. */ serial: u64, /** Ordinal of the device. */ unit: u32, /** True to switch it on. */ on: bool } fds 0,
    }
    /// From the inventory.
    enum FromInventory {
        /// The number of devices.
        1 Units { /** The request's serial. */ serial: u64, /** Number of devices. */ count: u32 } fds 0,
        /// Memory in bytes, in the driver's count.
        2 Memory { /** The request's serial. */ serial: u64, /** All bytes. */ total: u64, /** Used bytes. */ used: u64, /** Free bytes. */ free: u64 } fds 0,
        /// A process on a device.
        3 Process {
            /** The request's serial. */ serial: u64,
            /** The process. */ process: u32,
            /** True if the driver lists it. */ present: bool,
            /** Bytes that the driver books to it; 0 if unknown. */ bytes: u64,
            /** Percent of recent time in which its kernels ran; `u32::MAX` if the driver does not report it, or for a query of one process. */ busy: u32
        } fds 0,
        /// The driver's management library returned an error.
        4 Failed { /** The request's serial. */ serial: u64, /** An nvmlReturn_t. */ error: u32 } fds 0,
        /// Reports an error of a device. To `sluiced` only.
        5 Xid {
            /** Ordinal of the device. */ unit: u32,
            /** The Xid. */ xid: u32,
            /** The process, if known; else 0. */ process: u32,
            /** The GPU instance, if the driver reports one; else [`WHOLE`](crate::inventory::WHOLE). */ instance: u32
        } fds 0,
        /// The identity of a device.
        6 Device {
            /** The request's serial. */ serial: u64,
            /** Its UUID. */ uuid: [u8; 16],
            /** Bytes of its memory. */ memory: u64,
            /** Number of its multiprocessors; 0 if unknown. */ multiprocessors: u32,
            /** The host's NUMA node that is near it; `u32::MAX` if unknown. */ node: u32,
            /** Its address on the PCI bus. */ pci: PciAddress
        } fds 0,
        /// A part of a name.
        7 Name { /** The request's serial. */ serial: u64, /** The part. */ text: NamePart } fds 0,
        /// The health of a device.
        8 Health {
            /** The request's serial. */ serial: u64,
            /** MIG mode: division into instances. */ mig: Switch,
            /** MIG mode after the next reset. */ pending: Switch,
            /** Error correction of its memory. */ ecc: Switch,
            /** The action that the driver recommends. */ recovery: Recovery,
            /** Uncorrected errors of its memory since the driver started; `u64::MAX` if not counted. */ uncorrected: u64,
            /** True if memory waits for a reset to be taken out of use. */ repair: bool
        } fds 0,
        /// Utilization, in percent of the time since the last question.
        9 Utilization { /** The request's serial. */ serial: u64, /** Utilization by kernels. */ gpu: u32, /** Utilization of memory. */ memory: u32 } fds 0,
        /// A profile of a device.
        10 Profile { /** The request's serial. */ serial: u64, /** The profile. */ profile: InstanceProfile } fds 0,
        /// The possible places of instances of a profile.
        11 Places { /** The request's serial. */ serial: u64, /** All of them. */ places: InstancePlaces } fds 0,
        /// The number of further instances of a profile.
        12 Capacity { /** The request's serial. */ serial: u64, /** Number of instances. */ count: u32 } fds 0,
        /// An existing instance.
        13 Instance { /** The request's serial. */ serial: u64, /** The instance. */ instance: Instance } fds 0,
        /// The index is behind the last entry.
        14 Nothing { /** The request's serial. */ serial: u64 } fds 0,
        /// The change is done.
        15 Done { /** The request's serial. */ serial: u64 } fds 0,
    }
    /// From the launcher to `sluiced`.
    enum FromLauncher {
        /// A process runs. Descriptors: its control socket, its pidfd, and `cgroup.kill`, open for writing, if it is `grouped`.
        1 Started {
            /** Its process id. */ process: u32,
            /** Its start in ticks since boot, because process numbers are reused. */ started: u64,
            /** True if it has a cgroup of its own. */ grouped: bool
        } fds 2 plus grouped,
        /// The kernel refused a part of the request; `error` is an errno.
        2 Failed { /** An errno. */ error: u32 } fds 0,
        /// All requests before `Settle` have been answered; the sockets of `RemoveSockets` are removed; the processes of `EndAll` are killed.
        3 Settled {} fds 0,
        /// A process that lives. Descriptors: its pidfd, and `cgroup.kill`, open for writing, if it is `grouped`.
        4 Found {
            /** Its start in ticks since boot. */ started: u64,
            /** True for a worker of a VM. */ worker: bool,
            /** True if it has a cgroup of its own. */ grouped: bool
        } fds 1 plus grouped,
        /// The launcher serves. Descriptor: the kernel's list of its children.
        5 Attached {
            /** Its process id. */ process: u32,
            /** True if it was not told yet which workers of an earlier launcher continue. */ fresh: bool
        } fds 1,
        /// The launcher does not carry out the request.
        6 Refused { /** The reason. */ refusal: LaunchRefusal } fds 0,
    }
}

/// The first message to a worker, from `sluiced`, on the socket that then belongs to the device.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct WorkerSetup {
    /// The VM's number, for logs.
    pub vm: u32,
    /// The session's number, for logs; 0 for a worker that waits for its session.
    pub session: u32,
    /// Absolute path of the driver library to load.
    pub driver: String,
    /// Runs of guest pages that the worker maps one by one; further ones are gathered.
    pub mapped_runs: u32,
    /// Operations that the driver takes for one stream before it makes its caller wait.
    pub driver_queue: u64,
    /// Number of [`ToWorker::Custody`] messages that follow: one per device, in order of the ordinals. There are no other devices.
    pub devices: u32,
    /// True if memory is also cleared each time a guest's allocation is freed, before it is used again.
    pub scrub_every_free: bool,
    /// The UUID of the only device that the driver must show; `None` for any.
    pub identity: Option<[u8; 16]>,
}

/// The first message to an arbiter, from `sluiced`.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ArbiterSetup {
    /// The unit's number, for logs.
    pub unit: u32,
    /// Absolute path of the driver library to load.
    pub driver: String,
    /// Ordinal of the device in the arbiter's driver.
    pub device: u32,
    /// The UUID of the only device that the driver must show; `None` for any.
    pub identity: Option<[u8; 16]>,
    /// Ordinal of the device in the inventory.
    pub listed: u32,
    /// The unit's GPU instance, or [`WHOLE`](crate::inventory::WHOLE).
    pub instance: u32,
    /// The part of scrubbed memory that is read back.
    pub verify: Verify,
    /// True if memory is scrubbed at all. Without it remnants reach other tenants: for the positive control of tests only.
    pub scrub: bool,
    /// Bytes left to the driver beside the memory of contexts.
    pub reserve: u64,
    /// Bytes of each file for receipts of scrubs; the files come with the message.
    pub receipts: u64,
}

/// The part of scrubbed memory that is read back before it counts as clean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum Verify {
    /// Samples of each chunk.
    Sampled,
    /// Every byte.
    All,
}

/// A VM's share of a unit's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeShare {
    /// Its weight relative to those of others that have work at the same time; 1 to [`sluice_protocol::limits::WEIGHT`].
    pub weight: u32,
    /// Its priority over other VMs.
    pub priority: Priority,
    /// Thousandths of the unit's time that it never exceeds in the long run, even if no other VM needs them; 1000 for all.
    pub cap: u32,
    /// Thousandths of the unit's time that it gets whenever it has work, regardless of weights and priorities.
    pub guarantee: u32,
    /// Kill a worker if none of its submitted work completes within this many milliseconds; 0 for never.
    pub hang: u32,
}

impl Default for TimeShare {
    fn default() -> TimeShare {
        TimeShare { weight: 100, priority: Priority::Normal, cap: 1000, guarantee: 0, hang: 0 }
    }
}

impl<'a> Field<'a> for TimeShare {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        let TimeShare { weight, priority, cap, guarantee, hang } = self;
        weight.put(writer)?;
        priority.put(writer)?;
        [cap, guarantee, hang].into_iter().try_for_each(|value| value.put(writer))
    }

    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        Ok(TimeShare {
            weight: Field::get(reader)?,
            priority: Field::get(reader)?,
            cap: Field::get(reader)?,
            guarantee: Field::get(reader)?,
            hang: Field::get(reader)?,
        })
    }
}

numbered! {
    /// The order in which VMs get time.
    #[derive(Default, PartialOrd, Ord)]
    pub enum Priority {
        /// Gets the time that others leave.
        Low = 0,
        /// The default priority.
        #[default]
        Normal = 1,
        /// Gets time before all others.
        High = 2,
    }
    /// Abilities of a driver that each session needs.
    pub enum NeededAbility {
        /// It imports memory that another process has made and exported.
        Import = 1,
        /// It reserves the addresses that a program wants, if they are free.
        FixedAddresses = 2,
        /// It pins guest memory, in as many pieces as a worker maps one by one.
        Registration = 3,
    }
    /// The reasons for which the launcher does not carry out a request, apart from errors of the kernel.
    #[derive(thiserror::Error)]
    pub enum LaunchRefusal {
        /// The request is malformed, or is not one for this kind of launcher.
        #[error("the request is malformed, or is not one for this launcher")]
        BadRequest = 1,
        /// The VM, the unit or a value of the request is outside of the launcher's configuration.
        #[error("its configuration does not allow this VM, unit or value")]
        OutOfRange = 2,
        /// The client has another configuration.
        #[error("it has another configuration than its client")]
        OtherConfiguration = 3,
        /// The earlier device, arbiter or probe is not reaped.
        #[error("the earlier one has not been reaped, as when a debugger holds it")]
        NotReaped = 4,
        /// As many processes of this kind as the launcher allows are not reaped.
        #[error("too many processes of this kind have not been reaped")]
        TooMany = 5,
        /// Processes are users of their own, and all of them are in use.
        #[error("all users of worker-uids are in use")]
        NoUser = 6,
        /// The device of the VM is not reaped, or its cgroup has processes.
        #[error("the VM's device runs")]
        DeviceRuns = 7,
        /// The process is none of the launcher's, or has ended.
        #[error("it has no such process")]
        NoProcess = 8,
    }
    /// The memory of its process that a kernel reaches although CUDA was never given it, by the driver's attributes.
    pub enum HostAccess {
        /// None.
        None = 0,
        /// All pageable memory, through tables that the driver keeps (HMM): attribute 88 is set, attribute 100 is not.
        Pageable = 1,
        /// All memory, through the host's page tables (ATS): attribute 100 is set.
        HostPageTables = 2,
    }
    /// An arbiter's use of the driver's bytes per process.
    #[derive(Default)]
    pub enum Figures {
        /// No probe has finished yet.
        #[default]
        Unknown = 0,
        /// Used: a probe has shown to which process lent memory is booked.
        Used = 1,
        /// Not used: there are none, or a probe has shown that they cannot be used.
        Unused = 2,
    }
    /// Events of an arbiter: kinds of [`FromArbiter::Event`].
    pub enum ArbiterEvent {
        /// A worker broke the custody protocol and was ended.
        Abuse = 1,
        /// The ledger's sums or states contradict each other.
        LedgerBroken = 2,
        /// The inventory and the ledger differ by more than is normal.
        Drift = 3,
        /// Some process still holds memory that its VM gave back.
        Leak = 4,
        /// A chunk was not clean after scrubbing.
        ScrubFailed = 5,
        /// A process that is no worker uses the device.
        ForeignProcess = 6,
        /// The drivers of a VM took more than its quota, and a worker was ended.
        Headroom = 7,
        /// A worker was killed and the driver still lists it after a long time.
        Stuck = 8,
        /// A worker has taken memory again and again over a long time and given none back.
        Growing = 9,
        /// None of a worker's submitted work completed for so long that it was ended.
        Hung = 10,
        /// The driver saw a VM use more of the device's time than it is charged.
        Undercharged = 11,
        /// The device failed the arbiter's own probe, or did not complete it in time; the arbiter ends.
        ProbeFailed = 12,
        /// Receipts of scrubs could not be written: the event's bytes are their number.
        ReceiptsLost = 20,
    }
}

/// The only use of bincode: messages that go down, and are the first on their sockets. [`VERSION`] precedes each,
/// so that no message is misread.
pub mod codec {
    use super::{SETUP_BYTES, VERSION, VersionError, same_version};

    const CONFIGURATION: bincode::config::Configuration<
        bincode::config::LittleEndian,
        bincode::config::Fixint,
        bincode::config::Limit<{ SETUP_BYTES }>,
    > = bincode::config::standard().with_fixed_int_encoding().with_limit::<{ SETUP_BYTES }>();

    /// The reason why a message cannot be encoded or decoded.
    #[derive(Debug, thiserror::Error)]
    pub enum CodecError {
        /// The message is too long.
        #[error("cannot encode: {0}")]
        Encode(#[from] bincode::error::EncodeError),
        /// The message is malformed.
        #[error("cannot decode: {0}")]
        Decode(#[from] bincode::error::DecodeError),
        /// There are bytes after the message.
        #[error("{0} bytes follow the message")]
        Trailing(usize),
        /// The message has another version.
        #[error(transparent)]
        Version(#[from] VersionError),
    }

    /// Encodes a message.
    ///
    /// # Errors
    /// [`CodecError`] if it is longer than [`SETUP_BYTES`].
    pub fn encode(message: &impl bincode::Encode) -> Result<Vec<u8>, CodecError> {
        // The configuration's limit applies to decoding only.
        let bytes = bincode::encode_to_vec((VERSION, message), CONFIGURATION)?;
        if bytes.len() > SETUP_BYTES {
            return Err(bincode::error::EncodeError::Other("longer than a message").into());
        }
        Ok(bytes)
    }

    /// Decodes a complete message.
    ///
    /// # Errors
    /// [`CodecError`] if the bytes are not exactly one such message.
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
