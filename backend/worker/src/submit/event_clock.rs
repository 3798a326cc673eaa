//! The times at which markers were reached, by the driver's clock and in the host's time.
//!
//! A marker is found reached a while after it was: up to a poll later, or as long as a busy host takes to run the thread that
//! polls. The driver knows the moment itself, relative to another event of the same context: the *anchor*. The host time of the
//! anchor is not known either, but it cannot be later than the moment at which any event measured against it was seen; so the
//! estimate improves with every measurement. The driver gives spans as floats of milliseconds, and its clock may drift against
//! the host's, so an anchor is used for a limited time only and then replaced.
//!
//! The time at which work *begins* is taken from the host's clock: from the call that submitted it, or from the end of the work
//! before it. An event before each piece of work would cost a driver call per piece, and gives the same time wherever the
//! device is free.

use crate::{session::objects::ContextRef, submit::fences::Marker};
use sluice_driver::Handle;
use sluice_scheduler::Nanos;

/// Time for which an anchor is used: over this time spans are precise to a quarter of a microsecond.
const USED: Nanos = 2_000_000_000;
/// The clocks may differ by one part in this many of a span.
const DRIFT: Nanos = 10_000;
/// Limit on contexts with anchors; for other contexts the time is that at which a marker was seen.
const CONTEXTS: usize = 8;

#[derive(Clone, Copy, Debug)]
struct Anchor {
    context: ContextRef,
    event: Handle,
    /// The latest host time at which it can have been reached.
    host: Nanos,
    made: Nanos,
}

/// The anchors.
#[derive(Debug, Default)]
pub(crate) struct EventClock {
    anchors: Vec<Anchor>,
}

/// The further use of a marker's event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Becomes {
    /// The event can be recorded again.
    Free,
    /// The event is the anchor, and the earlier one no longer is.
    Anchor(Option<Handle>),
}

impl EventClock {
    /// The time at which a marker, seen at `now`, was reached; `elapsed` queries the driver for the span between two events.
    pub(crate) fn reached(
        &mut self,
        marker: &Marker,
        now: Nanos,
        elapsed: impl FnOnce(Handle, Handle) -> Option<f32>,
    ) -> Nanos {
        let Some(anchor) = self.anchors.iter_mut().find(|anchor| anchor.context == marker.context) else {
            return now;
        };
        let Some(span) = elapsed(anchor.event, marker.event) else { return now };
        let at = anchor.host.saturating_add_signed(nanoseconds(span));
        if at > now {
            anchor.host = anchor.host.saturating_sub(at - now);
        }
        at.min(now)
    }

    /// Makes a marker's event the anchor of its context, if there is none or an old one. It was reached at `at`.
    pub(crate) fn adopt(&mut self, marker: &Marker, at: Nanos, now: Nanos) -> Becomes {
        let fresh = |host| Anchor { context: marker.context, event: marker.event, host, made: now };
        let has_room = self.anchors.len() < CONTEXTS;
        match self.anchors.iter_mut().find(|anchor| anchor.context == marker.context) {
            Some(anchor) => {
                let age = now.saturating_sub(anchor.made);
                if age < USED {
                    return Becomes::Free;
                }
                let before = anchor.event;
                *anchor = fresh(at.saturating_add(age / DRIFT).min(now));
                Becomes::Anchor(Some(before))
            }
            None if has_room => {
                self.anchors.push(fresh(now));
                Becomes::Anchor(None)
            }
            None => Becomes::Free,
        }
    }

    /// Removes a context that is being destroyed with its events.
    pub(crate) fn forget(&mut self, context: ContextRef) {
        self.anchors.retain(|anchor| anchor.context != context);
    }
}

fn nanoseconds(milliseconds: f32) -> i64 {
    #[expect(clippy::cast_possible_truncation, reason = "it saturates, and NaN is 0")]
    let nanoseconds = (f64::from(milliseconds) * 1e6) as i64;
    nanoseconds
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::submit::time::SequenceTicket;

    const CONTEXT: ContextRef = ContextRef { handle: 1, serial: 1 };

    fn marker(event: Handle) -> Marker {
        Marker { sequence: 1, event, context: CONTEXT, ticket: SequenceTicket::default(), staged: 0 }
    }

    // Promise: T31
    #[test]
    fn marker_seen_late_gets_the_time_at_which_it_was_reached() {
        let mut clock = EventClock::default();
        // The handle of an event is the microsecond at which it was reached.
        let elapsed = |from: Handle, to: Handle| Some((to as f32 - from as f32) / 1e3);
        let mut at = |event: Handle, seen_after: Nanos| {
            let (marker, now) = (marker(event), event * 1000 + seen_after);
            let at = clock.reached(&marker, now, elapsed);
            (at, clock.adopt(&marker, at, now))
        };
        assert_eq!(at(1000, 700_000), (1_700_000, Becomes::Anchor(None)), "there is no anchor yet");
        // Seen after 20 µs: the anchor was reached earlier than estimated.
        assert_eq!(at(2000, 20_000), (2_020_000, Becomes::Free));
        let (late, _) = at(5000, 3_000_000);
        assert!((5_000_000..=5_021_000).contains(&late), "{late}");
        let (late, _) = at(900_000, 9_000_000);
        assert!((900_000_000..=900_021_000).contains(&late), "{late}");
        // The next anchor inherits the estimate, less the possible drift of the clocks.
        let (late, became) = at(2_500_000, 1_000_000);
        assert!((2_500_000_000..=2_500_021_000).contains(&late), "{late}");
        assert_eq!(became, Becomes::Anchor(Some(1000)));
        let (late, _) = at(2_600_000, 50_000_000);
        assert!((2_600_000_000..=2_600_280_000).contains(&late), "{late}");
    }

    #[test]
    fn clock_without_a_span_or_an_anchor_returns_the_time_seen() {
        let mut clock = EventClock::default();
        assert_eq!(clock.adopt(&marker(1), 10, 10), Becomes::Anchor(None));
        assert_eq!(clock.reached(&marker(2), 50, |_, _| None), 50);
        assert_eq!(clock.reached(&marker(2), 50, |_, _| Some(f32::NAN)), 10);
        assert_eq!(clock.reached(&marker(2), 50, |_, _| Some(f32::INFINITY)), 50);
        clock.forget(CONTEXT);
        assert_eq!(clock.reached(&marker(2), 60, |_, _| Some(0.0)), 60);
        for serial in 0..20 {
            let context = ContextRef { handle: 1, serial };
            let _ = clock.adopt(&Marker { context, ..marker(serial) }, 0, 0);
        }
        assert_eq!(clock.anchors.len(), CONTEXTS);
    }
}
