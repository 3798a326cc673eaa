//! Answering: one request at a time, in the order in which sockets become readable.
//!
//! Nothing here waits for a peer. A client whose socket is full, closed or brings something that is no request is
//! forgotten; `sluiced` gives it a new socket. Only `sluiced` may bring clients, and when it is gone, so is this process.

use crate::{nvml::Nvml, xid};
use rustix::{
    event::{PollFd, PollFlags, poll},
    fd::{AsFd as _, OwnedFd},
    io::Errno,
};
use sluice_cuda_abi::nvml::{Process, Result as Answered, Status};
use sluice_protocol::{
    control::{BYTES, FromInventory, ToInventory},
    inventory::WHOLE,
    limits,
};
use sluice_shared_memory::socket;
use std::sync::Arc;

/// Why the inventory ends before `sluiced` does.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The control socket fails.
    #[error("control socket: {0}")]
    Control(#[from] Errno),
    /// `sluiced` sends what is no request.
    #[error("what sluiced sends is no request")]
    Malformed,
    /// There is no thread for errors of devices.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// A socket, and the list that its last question for the first process was answered from.
struct Peer {
    socket: Arc<OwnedFd>,
    listed: Option<(u32, Vec<Process>)>,
}

impl Peer {
    fn new(socket: OwnedFd) -> Result<Peer, Errno> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Peer { socket: Arc::new(socket), listed: None })
    }

    /// The next request; `None` when there is none yet.
    fn receive(&self) -> Result<Option<(ToInventory, Option<OwnedFd>)>, Gone> {
        let mut buffer = [0; BYTES];
        let (message, mut descriptors) = match socket::receive(&*self.socket, &mut buffer) {
            Ok(Some(received)) => received,
            Ok(None) | Err(Errno::CONNRESET) => return Err(Gone::Closed),
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(Errno::MSGSIZE) => return Err(Gone::Malformed),
            Err(error) => return Err(Gone::Failed(error)),
        };
        let request = ToInventory::decode(message).map_err(|_| Gone::Malformed)?;
        if descriptors.len() != request.descriptors() {
            return Err(Gone::Malformed);
        }
        Ok(Some((request, descriptors.pop())))
    }
}

/// Why a peer is heard no more.
enum Gone {
    Closed,
    Malformed,
    Failed(Errno),
}

/// Answers on `control`, and on the sockets that come over it, until its other end is closed.
///
/// # Errors
/// [`ServeError`] when the control socket fails or brings nonsense.
pub fn serve(nvml: Nvml, control: OwnedFd) -> Result<(), ServeError> {
    let nvml = Arc::new(nvml);
    // The first one is `sluiced`.
    let mut peers = vec![Peer::new(control)?];
    if let Some(daemon) = peers.first() {
        xid::start(&nvml, &daemon.socket)?;
    }
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
            match answer(&nvml, peer, (index == 0).then_some(&mut clients)) {
                Ok(()) => {}
                Err(Gone::Closed) if index == 0 => return Ok(()),
                Err(Gone::Malformed) if index == 0 => return Err(ServeError::Malformed),
                Err(Gone::Failed(error)) if index == 0 => return Err(error.into()),
                Err(why) => {
                    match why {
                        Gone::Closed => {}
                        Gone::Malformed => tracing::warn!("a client sends what is no request"),
                        Gone::Failed(error) => tracing::warn!("a client cannot be answered: {error}"),
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
                tracing::error!("too many clients: a new one is refused");
                continue;
            }
            peers.push(Peer::new(client)?);
        }
    }
}

/// Answers one request. From who may bring clients, new ones go to `clients`.
fn answer(nvml: &Nvml, peer: &mut Peer, clients: Option<&mut Vec<OwnedFd>>) -> Result<(), Gone> {
    let Some((request, descriptor)) = peer.receive()? else { return Ok(()) };
    let (serial, answered) = match request {
        ToInventory::Units { serial } => {
            (serial, nvml.count().map(|count| FromInventory::Units { serial, count }))
        }
        ToInventory::Memory { serial, unit, instance: WHOLE } => {
            let answered = nvml.memory(unit).map(|memory| FromInventory::Memory {
                serial,
                total: memory.total,
                used: memory.used,
                free: memory.total.saturating_sub(memory.used),
            });
            (serial, answered)
        }
        ToInventory::Process { serial, unit, process, instance: WHOLE } => {
            // Never from a list that was there already: memory changes hands by this answer.
            let answered = nvml.processes(unit).map(|list| {
                let found = list.iter().find(|listed| listed.pid == process);
                FromInventory::Process {
                    serial,
                    process,
                    present: found.is_some(),
                    bytes: found.map_or(0, |found| found.bytes),
                }
            });
            (serial, answered)
        }
        ToInventory::Nth { serial, unit, index, instance: WHOLE } => {
            (serial, nth(nvml, peer, serial, unit, index))
        }
        ToInventory::Memory { serial, .. }
        | ToInventory::Process { serial, .. }
        | ToInventory::Nth { serial, .. }
        | ToInventory::Device { serial, .. }
        | ToInventory::DeviceName { serial, .. }
        | ToInventory::Health { serial, .. }
        | ToInventory::Utilization { serial, .. }
        | ToInventory::Profile { serial, .. }
        | ToInventory::ProfileName { serial, .. }
        | ToInventory::Places { serial, .. }
        | ToInventory::Capacity { serial, .. }
        | ToInventory::Instance { serial, .. }
        | ToInventory::Create { serial, .. }
        | ToInventory::Destroy { serial, .. }
        | ToInventory::SetMig { serial, .. } => (serial, Err(Status::FUNCTION_NOT_FOUND)),
        ToInventory::Client {} => {
            let clients = clients.ok_or(Gone::Malformed)?;
            clients.extend(descriptor);
            return Ok(());
        }
    };
    let message = answered.unwrap_or_else(|Status(error)| FromInventory::Failed { serial, error });
    match socket::send(&*peer.socket, &message.encode(), &[]) {
        Ok(()) => Ok(()),
        Err(Errno::PIPE | Errno::CONNRESET) => Err(Gone::Closed),
        Err(error) => Err(Gone::Failed(error)),
    }
}

/// One of a device's processes. A peer that counts up goes through one list, however much changes meanwhile.
fn nth(nvml: &Nvml, peer: &mut Peer, serial: u64, unit: u32, index: u32) -> Answered<FromInventory> {
    let list = match &mut peer.listed {
        Some((listed, list)) if *listed == unit && index > 0 => list,
        listed => &mut listed.insert((unit, nvml.processes(unit)?)).1,
    };
    let found = usize::try_from(index).ok().and_then(|index| list.get(index));
    Ok(FromInventory::Process {
        serial,
        process: found.map_or(0, |found| found.pid),
        present: found.is_some(),
        bytes: found.map_or(0, |found| found.bytes),
    })
}
