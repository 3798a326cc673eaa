//! The search for pages that the host has taken back although a worker maps them.
//!
//! A balloon of an honest guest takes no page that a session uses. A hostile guest gives pages of an arena back and keeps them: the
//! driver has pinned them, so the memory file of the VMM gets other pages in their place, and kernels of the guest go on to use the
//! first ones, which the host regards as free. Such a session is ended. A control resource is not pinned.

use super::Device;
use crate::{
    memory::{MemoryPolicy, PagePlace, PageSearch},
    sessions::{SessionPhase, UNAVAILABLE},
};
use rustix::io::Errno;
use sluice_runtime::limited;
use std::time::{Duration, Instant};

/// Period of the searches.
const PERIOD: Duration = Duration::from_secs(1);
/// Effort of one search, in pages: about a millisecond. A GiB takes eight searches.
const EFFORT: u64 = 1 << 15;

/// The state of the search, which goes through the arenas of all sessions again and again.
#[derive(Debug)]
pub(super) struct FreedSearch {
    /// The time of the next search; `None` if there is nothing to search, or the kernel cannot count pages.
    due: Option<Instant>,
    /// Resources that are left of this pass, and the place in the last of them.
    left: Vec<u32>,
    place: PagePlace,
    is_possible: bool,
}

impl FreedSearch {
    /// A search in the memory of VMMs. A program of the host that is a guest itself has its memory from no balloon.
    pub(super) fn new(policy: MemoryPolicy) -> FreedSearch {
        let is_possible = policy != MemoryPolicy::Sealed;
        FreedSearch { due: None, left: Vec::new(), place: PagePlace::default(), is_possible }
    }

    pub(super) const fn deadline(&self) -> Option<Instant> {
        self.due
    }
}

impl Device {
    /// Begins to search, because an arena is attached.
    pub(super) fn begin_freed_search(&mut self) {
        if self.freed_search.is_possible && self.freed_search.due.is_none() {
            let due = Instant::now().checked_add(PERIOD);
            self.freed_search.due = due;
            due.into_iter().for_each(|due| self.poller.at_most(due));
        }
    }

    /// Searches the next pages, if it is time, and ends sessions whose pages were freed.
    pub(super) fn continue_freed_search(&mut self, now: Instant) {
        if self.freed_search.due.is_none_or(|due| now < due) {
            return;
        }
        self.freed_search.due = None;
        if self.freed_search.left.is_empty() {
            self.freed_search.left = self.resources.arenas().collect();
            self.freed_search.place = PagePlace::default();
        }
        let mut effort = EFFORT;
        while let Some(resource) = self.freed_search.left.last().copied() {
            match self.search_resource(resource, &mut effort) {
                Ok(PageSearch::Unfinished(place)) => {
                    self.freed_search.place = place;
                    break;
                }
                Ok(PageSearch::Whole | PageSearch::Freed) => {
                    self.freed_search.left.pop();
                    self.freed_search.place = PagePlace::default();
                }
                Err(error) => {
                    self.freed_search.is_possible = false;
                    tracing::warn!(%error, "a guest that gives pinned pages back to its host is not found; this needs Linux 6.5");
                    return;
                }
            }
        }
        if self.resources.arenas().next().is_some() {
            self.freed_search.due = now.checked_add(PERIOD);
        }
    }

    fn search_resource(&mut self, id: u32, effort: &mut u64) -> Result<PageSearch, Errno> {
        let Ok(resource) = self.resources.get(id) else { return Ok(PageSearch::Whole) };
        let Some(user) = resource.user else { return Ok(PageSearch::Whole) };
        let phase = self.sessions.get(&user.session).map(|session| &session.phase);
        if !matches!(phase, Some(SessionPhase::Running(_))) {
            return Ok(PageSearch::Whole);
        }
        let found = self.table.search_freed(resource.runs(), self.freed_search.place, effort)?;
        if found == PageSearch::Freed {
            let session = user.session;
            limited!(warn, session, "the host has taken back pages that a session uses; the session ends");
            self.lose(session, UNAVAILABLE);
        }
        Ok(found)
    }
}
