//! The logs of children.

use std::time::Instant;

use rustix::{
    event::{
        Timespec,
        epoll::{self, EventData, EventFlags},
    },
    fd::AsFd,
    io::Errno,
};
use sluice_runtime::child_log::NextRead;

use super::{
    Launcher,
    children::{Child, LOG},
};

impl Launcher {
    /// Watches the log of a child for new data.
    pub(super) fn watch_log(&self, key: u64, child: &Child) -> Result<(), Errno> {
        let Some(log) = &child.log else { return Ok(()) };
        epoll::add(&self.events, log, EventData::new_u64(key | LOG), EventFlags::IN)
    }

    /// Reads the log of a child that has new data or was closed.
    pub(super) fn read_log(&mut self, key: u64) {
        let Some(child) = self.children.get_mut(&key) else { return };
        let Some(log) = &mut child.log else { return };
        let next = log.read(&mut self.guest_limits, Instant::now());
        if matches!(next, NextRead::Wait | NextRead::More) {
            return;
        }
        // Closing our end is not enough if a child between fork and exec has a copy.
        if let Err(error) = epoll::delete(&self.events, &*log) {
            tracing::error!(%error, "cannot remove a descriptor from the epoll set");
        }
        if let NextRead::At(when) = next {
            child.quiet_until = Some(when);
            self.quiet.insert((when, key));
        } else {
            child.log = None;
        }
    }

    /// Continues with paused logs; returns the time until the next.
    pub(super) fn read_quiet_logs(&mut self) -> Option<Timespec> {
        loop {
            let (when, key) = *self.quiet.first()?;
            let now = Instant::now();
            if when > now {
                // Rounded up, because a wake-up too early would repeat at once.
                let wait = when.saturating_duration_since(now) + std::time::Duration::from_millis(1);
                return Timespec::try_from(wait).ok();
            }
            self.quiet.pop_first();
            let Some(child) = self.children.get_mut(&key) else { continue };
            child.quiet_until = None;
            let child = &self.children[&key];
            if let Err(error) = self.watch_log(key, child) {
                tracing::error!(role = %child.role, %error, "cannot watch the log of a child");
            }
        }
    }

    /// A child has ended: passes on the rest of its log.
    pub(super) fn finish_log(&mut self, key: u64) {
        let Some(child) = self.children.get_mut(&key) else { return };
        let (log, quiet_until) = (child.log.take(), child.quiet_until.take());
        let Some(mut log) = log else { return };
        let now = Instant::now();
        log.finish(&mut self.guest_limits, now);
        match quiet_until {
            Some(when) => _ = self.quiet.remove(&(when, key)),
            None => self.leave(log.as_fd()),
        }
        self.guest_limits.forget_full(now);
    }
}
