//! Processes made ahead: each start of a device or a worker leaves one behind for the next start of the same kind.
//!
//! Namespaces take most of the time of a start, and a mount namespace waits for other processors, too: 2 ms on an idle host, and ten
//! times as long on a busy one. A process that was made ahead has them, its user, its limits and its rules, and nothing of any VM: it waits for
//! its descriptors with a copy of this process's memory, and executes its program only then. It is used once, and not at all if a file
//! that it sees has been replaced since.

use std::time::{Duration, Instant};

use rustix::event::Timespec;

use super::{Launcher, confinement::Confinement, role::ChildRole, spawn::ChildShape, starting::MadeChild};

/// Largest number of processes made ahead; the oldest one ends first.
const MOST: usize = 16;

/// The kinds of processes that are made ahead: those that are started often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReadyKind {
    Device,
    Worker,
}

impl ReadyKind {
    /// Time after a start until the next process is made: that of a worker has begun its session by then, and needs the
    /// processors no longer.
    const fn pause(self) -> Duration {
        match self {
            Self::Device => Duration::ZERO,
            Self::Worker => Duration::from_millis(5),
        }
    }

    const fn of(role: ChildRole) -> Option<Self> {
        match role {
            ChildRole::Device(_) => Some(Self::Device),
            ChildRole::Worker(_) => Some(Self::Worker),
            ChildRole::Arbiter(_) | ChildRole::Probe(_) | ChildRole::Inventory => None,
        }
    }
}

/// A process that was made ahead.
#[derive(Debug)]
pub(super) struct ReadyChild {
    kind: ReadyKind,
    shape: ChildShape,
    made: MadeChild,
}

/// A process to make ahead.
#[derive(Debug)]
pub(super) struct Wanted {
    role: ChildRole,
    kind: ReadyKind,
    shape: ChildShape,
    due: Instant,
}

impl Launcher {
    /// The numbers of the processes that were made ahead.
    pub(super) fn ready_processes(&self) -> impl Iterator<Item = u32> {
        self.ready.iter().map(|ready| ready.made.prepared.pid)
    }

    /// Takes a process that was made ahead for a role, if there is one.
    pub(super) fn take_ready(&mut self, role: ChildRole, shape: &ChildShape) -> Option<MadeChild> {
        let kind = ReadyKind::of(role)?;
        let at = self.ready.iter().position(|ready| ready.kind == kind && ready.shape == *shape)?;
        let made = self.ready.remove(at).made;
        if self.program(role).is_some_and(|program| made.prepared.sees_present_files(program, shape)) {
            return Some(made);
        }
        self.discard(made);
        None
    }

    /// Makes a process like one that has just been started, a little later. A kind that is wanted already keeps its time: steady starts
    /// do not put it off.
    pub(super) fn want_ready(&mut self, role: ChildRole, shape: ChildShape) {
        let confinement = self.program(role).and_then(|program| program.confinement.as_ref());
        if let Some(kind) = ReadyKind::of(role)
            && confinement.is_some_and(Confinement::has_namespaces)
        {
            let earlier = self.wanted.iter().position(|wanted| wanted.kind == kind);
            let earlier = earlier.map(|at| self.wanted.swap_remove(at).due);
            let due = earlier.unwrap_or_else(|| Instant::now() + kind.pause());
            self.wanted.push(Wanted { role, kind, shape, due });
        }
    }

    /// The time until a process has to be made, or `other` if that is shorter.
    pub(super) fn until_ready(&self, other: Option<Timespec>) -> Option<Timespec> {
        let due = self.wanted.iter().map(|wanted| wanted.due).min();
        let wait = due.and_then(|due| Timespec::try_from(due.saturating_duration_since(Instant::now())).ok());
        wait.into_iter().chain(other).min()
    }

    /// Makes one process that is wanted, if it is time: a request waits for no second one.
    pub(super) fn make_ready(&mut self) {
        let now = Instant::now();
        let Some(at) = self.wanted.iter().position(|wanted| wanted.due <= now) else { return };
        let Wanted { role, kind, shape, .. } = self.wanted.swap_remove(at);
        if self.ready.iter().any(|ready| ready.kind == kind && ready.shape == shape) {
            return;
        }
        // Without a free user none is made: it would take that of another process made ahead.
        let Ok(uid) = self.take_user(role) else { return };
        // A failure is logged; the next start tries again.
        let Ok(made) = self.make(role, &shape, uid) else { return };
        self.ready.push(ReadyChild { kind, shape, made });
        if self.ready.len() > MOST {
            self.end_oldest_ready();
        }
    }

    /// Ends the oldest process that was made ahead. False if there is none.
    pub(super) fn end_oldest_ready(&mut self) -> bool {
        let any = !self.ready.is_empty();
        if any {
            let oldest = self.ready.remove(0);
            self.discard(oldest.made);
        }
        any
    }

    /// Ends all processes that were made ahead, and wants no others.
    pub(super) fn end_ready(&mut self) {
        self.wanted.clear();
        while self.end_oldest_ready() {}
    }
}
