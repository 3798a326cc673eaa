//! The server loop: one request at a time, in the order in which sockets become readable.
//!
//! Nothing here waits for a peer. A client whose socket is full or closed, or that sends an invalid request, is forgotten;
//! `sluiced` gives it a new socket. Only `sluiced` may bring clients, and when it is gone, this process ends.

use crate::{
    changes::Changes,
    nvml::{DeviceHealth, DeviceIdentity, Nvml, ProcessUse},
    xid,
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    fd::{AsFd as _, OwnedFd},
    io::Errno,
};
use sluice_messages::{
    channel::{Channel, ReceiveError, Received},
    control::{FromInventory, ToInventory},
    inventory::{Instance, InstanceProfile, NamePart},
};
use sluice_nvml_abi::{Result as Answered, Status};
use sluice_protocol::limits;
use std::sync::Arc;

/// The reason why the inventory ends before `sluiced` does.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The control socket fails.
    #[error("the control socket failed: {0}")]
    Control(#[from] Errno),
    /// A message of `sluiced` is malformed.
    #[error("a message of sluiced is malformed")]
    Malformed,
    /// The thread for errors of devices cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// A socket, and the lists from its last questions with index 0: a client that counts up goes through one list, whatever changes meanwhile.
struct Peer {
    socket: Arc<Channel<ToInventory, FromInventory>>,
    processes: KeyedList<(u32, u32), ProcessUse>,
    profiles: KeyedList<u32, InstanceProfile>,
    instances: KeyedList<u32, Instance>,
}

/// A list and its key.
type KeyedList<K, T> = Option<(K, Vec<T>)>;

/// An entry of a list, which is queried again for index 0.
fn nth<K: PartialEq, T: Copy>(
    kept: &mut KeyedList<K, T>,
    of: K,
    index: u32,
    ask: impl FnOnce() -> Answered<Vec<T>>,
) -> Answered<Option<T>> {
    let list = match kept {
        Some((known, list)) if *known == of && index > 0 => list,
        kept => &mut kept.insert((of, ask()?)).1,
    };
    Ok(usize::try_from(index).ok().and_then(|index| list.get(index).copied()))
}

impl Peer {
    fn new(socket: OwnedFd) -> Result<Peer, Errno> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Peer { socket: Arc::new(Channel::new(socket)), processes: None, profiles: None, instances: None })
    }

    /// The next request; `None` if there is none yet.
    fn receive(&self) -> Result<Option<(ToInventory, Option<OwnedFd>)>, Gone> {
        match self.socket.receive() {
            Ok(Received::Message(request, mut descriptors)) => Ok(Some((request, descriptors.pop()))),
            Ok(Received::Empty) => Ok(None),
            Ok(Received::Closed) => Err(Gone::Closed),
            Err(ReceiveError::Failed(error)) => Err(Gone::Failed(error)),
            Err(_) => Err(Gone::Malformed),
        }
    }
}

/// The reason why a peer is dropped.
enum Gone {
    Closed,
    Malformed,
    Failed(Errno),
}

/// Answers on `control`, and on the sockets that come over it, until its other end is closed.
///
/// # Errors
/// [`ServeError`] if the control socket fails or a message on it is malformed.
pub fn serve(nvml: Nvml, control: OwnedFd) -> Result<(), ServeError> {
    let nvml = Arc::new(nvml);
    // The first one is `sluiced`.
    let daemon = Peer::new(control)?;
    xid::start(&nvml, &daemon.socket)?;
    let mut changes = Changes::new(&nvml, &daemon.socket);
    let mut peers = vec![daemon];
    loop {
        let mut polled: Vec<_> =
            peers.iter().map(|peer| PollFd::from_borrowed_fd(peer.socket.as_fd(), PollFlags::IN)).collect();
        match poll(&mut polled, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        let mut clients = Vec::new();
        let mut gone = Vec::new();
        for (index, peer) in peers.iter_mut().enumerate().filter(|(index, _)| ready[*index]) {
            let authority =
                (index == 0).then_some(Authority { changes: &mut changes, clients: &mut clients });
            match answer(&nvml, peer, authority) {
                Ok(()) => {}
                Err(Gone::Closed) if index == 0 => return Ok(()),
                Err(Gone::Malformed) if index == 0 => return Err(ServeError::Malformed),
                Err(Gone::Failed(error)) if index == 0 => return Err(error.into()),
                Err(why) => {
                    match why {
                        Gone::Closed => {}
                        Gone::Malformed => tracing::warn!("a client sent a malformed request"),
                        Gone::Failed(error) => tracing::warn!(%error, "cannot answer a client"),
                    }
                    gone.push(index);
                }
            }
        }
        for index in gone.into_iter().rev() {
            peers.swap_remove(index);
        }
        for client in clients {
            if peers.len() > limits::INVENTORY_CLIENTS {
                tracing::error!("a new client is refused: there are too many");
                continue;
            }
            peers.push(Peer::new(client)?);
        }
    }
}

/// The authority that only `sluiced` has.
struct Authority<'a> {
    changes: &'a mut Changes,
    clients: &'a mut Vec<OwnedFd>,
}

/// Answers one request. A peer with the authority may request changes, which are answered later, and bring clients.
fn answer(nvml: &Nvml, peer: &mut Peer, authority: Option<Authority<'_>>) -> Result<(), Gone> {
    let Some((request, descriptor)) = peer.receive()? else { return Ok(()) };
    let (serial, answered) = match request {
        ToInventory::Client {} => {
            authority.ok_or(Gone::Malformed)?.clients.extend(descriptor);
            return Ok(());
        }
        ToInventory::Create { serial, unit, .. }
        | ToInventory::Destroy { serial, unit, .. }
        | ToInventory::SetMig { serial, unit, .. } => {
            if authority.ok_or(Gone::Malformed)?.changes.ask(unit, request) {
                return Ok(());
            }
            (serial, Err(Status::INSUFFICIENT_RESOURCES))
        }
        question => say(nvml, peer, question),
    };
    let message = answered.unwrap_or_else(|Status(error)| FromInventory::Failed { serial, error });
    match peer.socket.send(&message, &[]) {
        Ok(()) => Ok(()),
        Err(Errno::PIPE | Errno::CONNRESET) => Err(Gone::Closed),
        Err(error) => Err(Gone::Failed(error)),
    }
}

/// The answer to a question, and the question's serial.
fn say(nvml: &Nvml, peer: &mut Peer, question: ToInventory) -> (u64, Answered<FromInventory>) {
    match question {
        ToInventory::Units { serial } => {
            (serial, nvml.count().map(|count| FromInventory::Units { serial, count }))
        }
        ToInventory::Memory { serial, unit, instance } => {
            let answered = nvml.memory(unit, instance).map(|memory| FromInventory::Memory {
                serial,
                total: memory.total,
                used: memory.used,
                free: memory.total.saturating_sub(memory.used),
            });
            (serial, answered)
        }
        ToInventory::Process { serial, unit, process, instance } => {
            // Never from an earlier list: memory is moved to other VMs after this answer.
            let answered = nvml.processes(unit, instance).map(|list| {
                let found = list.iter().find(|listed| listed.pid == process);
                FromInventory::Process {
                    serial,
                    process,
                    present: found.is_some(),
                    bytes: found.map_or(0, |found| found.bytes),
                    busy: u32::MAX,
                }
            });
            (serial, answered)
        }
        ToInventory::Nth { serial, unit, index, instance } => {
            let ask = || nvml.working(unit, instance);
            let found = nth(&mut peer.processes, (unit, instance), index, ask);
            let answer = |found: Option<ProcessUse>| FromInventory::Process {
                serial,
                process: found.map_or(0, |found| found.pid),
                present: found.is_some(),
                bytes: found.map_or(0, |found| found.bytes),
                busy: found.and_then(|found| found.busy).unwrap_or(u32::MAX),
            };
            (serial, found.map(answer))
        }
        ToInventory::Device { serial, unit } => {
            let answer = |DeviceIdentity { uuid, memory, multiprocessors, node, pci }| {
                FromInventory::Device { serial, uuid, memory, multiprocessors, node, pci }
            };
            (serial, nvml.identity(unit).map(answer))
        }
        ToInventory::DeviceName { serial, unit, part } => (
            serial,
            nvml.name(unit).map(|name| FromInventory::Name { serial, text: NamePart::part(&name, part) }),
        ),
        ToInventory::Health { serial, unit } => {
            let answer = |DeviceHealth { mig, pending, ecc, recovery, uncorrected, repair }| {
                FromInventory::Health { serial, mig, pending, ecc, recovery, uncorrected, repair }
            };
            (serial, nvml.health(unit).map(answer))
        }
        ToInventory::Utilization { serial, unit, instance } => {
            let answer = |(gpu, memory)| FromInventory::Utilization { serial, gpu, memory };
            (serial, nvml.utilization(unit, instance).map(answer))
        }
        ToInventory::Profile { serial, unit, index } => {
            let ask = || Ok(nvml.profiles(unit)?.into_iter().map(|(profile, _)| profile).collect());
            let answer = |found| match found {
                Some(profile) => FromInventory::Profile { serial, profile },
                None => FromInventory::Nothing { serial },
            };
            (serial, nth(&mut peer.profiles, unit, index, ask).map(answer))
        }
        ToInventory::ProfileName { serial, unit, profile, part } => {
            let answer =
                |(_, name): (_, String)| FromInventory::Name { serial, text: NamePart::part(&name, part) };
            (serial, nvml.profile_of(unit, profile).map(answer))
        }
        ToInventory::Places { serial, unit, profile } => {
            (serial, nvml.places(unit, profile).map(|places| FromInventory::Places { serial, places }))
        }
        ToInventory::Capacity { serial, unit, profile } => {
            (serial, nvml.capacity(unit, profile).map(|count| FromInventory::Capacity { serial, count }))
        }
        ToInventory::Instance { serial, unit, index } => {
            let answer = |found| match found {
                Some(instance) => FromInventory::Instance { serial, instance },
                None => FromInventory::Nothing { serial },
            };
            (serial, nth(&mut peer.instances, unit, index, || nvml.instances(unit)).map(answer))
        }
        // Handled before this function.
        ToInventory::Client {} => (0, Err(Status::INVALID_ARGUMENT)),
        ToInventory::Create { serial, .. }
        | ToInventory::Destroy { serial, .. }
        | ToInventory::SetMig { serial, .. } => (serial, Err(Status::INVALID_ARGUMENT)),
    }
}
