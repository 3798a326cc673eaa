//! Booking: the process to which the driver books memory that is lent.
//!
//! A management library reports how many bytes each process has, but not which memory it counts: a chunk may be booked to the
//! arbiter, which made it, to the worker that imported it, to both, or to no process. So at start-up the arbiter lends a chunk
//! to a *probe*, a process that does nothing else, and compares its figure before with the one after. A probe requests its
//! chunk when it has a context, and another one when it has mapped the first; the arbiter answers neither request before a look
//! that began later, so the result does not depend on the speed of any process. Every wait is bounded: a probe ends when its
//! time is over.
//!
//! On a part of a device no figure shows the booking. A probe there only shows that its process can use a lent chunk.

use crate::{
    custody::Millis,
    ids::{Class, VmKey, WorkerId},
};
use sluice_messages::{control::Figures, custody::UNIT};

/// The number of the VM that probes count as: no VM has it.
pub(crate) const NO_VM: u32 = 0;
/// Milliseconds that a probe may take, from its arrival on. A driver may need seconds to start.
const TIMEOUT: Millis = 10_000;
/// Looks in a row without a result, after which the probe ends.
const LOOKS: u32 = 3;

/// The processes whose figures include a lent chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Booking {
    /// The figure of the arbiter, which made it.
    Owner,
    /// The figure of the process that imported it.
    Importer,
    /// The figures of both.
    Both,
    /// No figure includes it.
    Nowhere,
}

impl Booking {
    /// The use of the figures for charging growth.
    pub(crate) const fn figures(self) -> Figures {
        match self {
            Booking::Owner | Booking::Importer | Booking::Both => Figures::Used,
            Booking::Nowhere => Figures::Unused,
        }
    }

    /// True if chunks lent to a process are part of its figure.
    pub(crate) const fn counts_imports(self) -> bool {
        matches!(self, Booking::Importer | Booking::Both)
    }
}

/// The sizes with which a probe's figures are compared.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Bytes of a context.
    pub(crate) context: u64,
    /// Bytes that a driver may take beyond the known ones.
    pub(crate) margin: u64,
}

impl Sizes {
    /// Bytes of the chunk that a probe is lent: too many to be confused with other growth of the driver.
    fn chunk(self) -> u64 {
        let least = self.margin.saturating_mul(4);
        let classes = Class::ALL.into_iter().rev();
        classes.map(Class::bytes).find(|bytes| *bytes > least).unwrap_or(Class::ALL[0].bytes())
    }

    /// The quota of a probe, in bytes.
    pub(crate) fn quota(self) -> u64 {
        let driver = self.context.saturating_add(self.margin.saturating_mul(2));
        self.chunk().saturating_add(driver).next_multiple_of(UNIT)
    }
}

/// A look at all processes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProbeReading {
    /// Bytes booked to the arbiter.
    pub(crate) made: Option<u64>,
    /// The sums of all chunks' bytes at the last look and at this one.
    pub(crate) chunks: [u64; 2],
    /// Bytes booked to the probe; the outer `None` if it is not listed.
    pub(crate) probe: Option<Option<u64>>,
}

/// The consequence of a request or a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProbeStep {
    /// Wait for the next request or look.
    Wait,
    /// Lend this many bytes (second) for this request (first).
    Lend(u64, u64),
    /// The booking is known.
    Found(Booking),
    /// The probe has used its chunk; its booking is not asked for.
    Used,
}

#[derive(Clone, Copy, Debug)]
enum ProbeState {
    /// The probe starts its driver.
    Starts,
    /// It waits for its chunk with this request.
    Asks(u64),
    /// It maps the chunk. Holds the bytes that were booked to it before.
    Maps(u64),
    /// It has mapped the chunk and waits with this request.
    Mapped(u64),
}

/// A probe that is under way.
#[derive(Debug)]
pub(crate) struct BookingProbe {
    worker: WorkerId,
    process: u32,
    vm: VmKey,
    sizes: Sizes,
    until: Millis,
    state: ProbeState,
    /// True if the look that is under way began before the probe was ready for it.
    stale: bool,
    unclear: u32,
    /// Looks between which custody grew or shrank by about as much as the chunk.
    moving: u32,
    /// True if the booking is to be found out. Otherwise the probe gets its chunk at once, and only shows that it can use it.
    books: bool,
}

impl BookingProbe {
    /// A probe with a worker that has just come, and its process; `books` is true if it is to find out the booking.
    pub(crate) const fn new(
        (worker, process): (WorkerId, u32),
        vm: VmKey,
        sizes: Sizes,
        books: bool,
        now: Millis,
    ) -> BookingProbe {
        let until = now.saturating_add(TIMEOUT);
        BookingProbe {
            worker,
            process,
            vm,
            sizes,
            until,
            state: ProbeState::Starts,
            stale: false,
            unclear: 0,
            moving: 0,
            books,
        }
    }

    /// True if it is to find out the booking.
    pub(crate) const fn books(&self) -> bool {
        self.books
    }

    pub(crate) const fn worker(&self) -> WorkerId {
        self.worker
    }

    pub(crate) const fn process(&self) -> u32 {
        self.process
    }

    pub(crate) const fn vm(&self) -> VmKey {
        self.vm
    }

    /// The time at which it ends without a result.
    pub(crate) const fn until(&self) -> Millis {
        self.until
    }

    /// The probe requests a chunk; `looking` is true while a look is under way.
    pub(crate) const fn takes(&mut self, serial: u64, looking: bool) -> ProbeStep {
        self.stale = looking;
        (self.unclear, self.moving) = (0, 0);
        let step;
        (self.state, step) = match self.state {
            ProbeState::Starts if self.books => (ProbeState::Asks(serial), ProbeStep::Wait),
            ProbeState::Starts => (ProbeState::Maps(0), ProbeStep::Lend(serial, UNIT)),
            ProbeState::Maps(before) if self.books => (ProbeState::Mapped(before), ProbeStep::Wait),
            ProbeState::Maps(before) => (ProbeState::Mapped(before), ProbeStep::Used),
            // A second request for the same thing has no effect.
            state @ (ProbeState::Asks(_) | ProbeState::Mapped(_)) => (state, ProbeStep::Wait),
        };
        step
    }

    /// Evaluates a look.
    pub(crate) fn evaluate(&mut self, reading: ProbeReading) -> ProbeStep {
        if core::mem::take(&mut self.stale) || !self.books {
            return ProbeStep::Wait;
        }
        let chunk = self.sizes.chunk();
        let about = |bytes: u64, expected: u64| bytes.abs_diff(expected) <= chunk / 4;
        // The driver may list it late.
        let Some(probe) = reading.probe else { return ProbeStep::Wait };
        let [last, now] = reading.chunks;
        if matches!(self.state, ProbeState::Mapped(_)) && last.abs_diff(now) > chunk / 4 {
            // The arbiter's figure may be of any time between the two, and show as much more or less as the chunk. Growth waits for the
            // probe, and custody may never rest, so the probe does not wait for that.
            self.moving += 1;
            if self.moving < LOOKS {
                return ProbeStep::Wait;
            }
        }
        match (self.state, probe) {
            (ProbeState::Starts | ProbeState::Maps(_), _) => ProbeStep::Wait,
            // The figure of a process includes at least the context of its own driver.
            (ProbeState::Asks(serial), Some(before))
                if before.saturating_add(chunk / 4) >= self.sizes.context =>
            {
                self.state = ProbeState::Maps(before);
                ProbeStep::Lend(serial, chunk)
            }
            (ProbeState::Mapped(before), Some(after)) if about(after, before) => {
                ProbeStep::Found(if self.is_made(reading) { Booking::Owner } else { Booking::Nowhere })
            }
            (ProbeState::Mapped(before), Some(after)) if about(after, before.saturating_add(chunk)) => {
                ProbeStep::Found(if self.is_made(reading) { Booking::Both } else { Booking::Importer })
            }
            (ProbeState::Asks(_) | ProbeState::Mapped(_), _) => {
                self.unclear += 1;
                if self.unclear < LOOKS { ProbeStep::Wait } else { ProbeStep::Found(Booking::Nowhere) }
            }
        }
    }

    /// True if the arbiter is listed with all chunks, including lent ones.
    fn is_made(&self, reading: ProbeReading) -> bool {
        // Chunks made since the last look may be newer than the list.
        let [last, now] = reading.chunks;
        let all = last.min(now).saturating_add(self.sizes.context);
        reading.made.is_some_and(|made| made.saturating_add(self.sizes.chunk() / 4) >= all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const SIZES: Sizes = Sizes { context: 500 * MIB, margin: 64 * MIB };
    const CHUNKS: u64 = 100 << 30;

    fn new_probe() -> BookingProbe {
        BookingProbe::new((WorkerId(1), 9), VmKey { vm: NO_VM, epoch: 1 }, SIZES, true, 0)
    }

    fn reading(made: Option<u64>, probe: Option<Option<u64>>) -> ProbeReading {
        ProbeReading { made, chunks: [CHUNKS; 2], probe }
    }

    /// The result of a probe. `made` and `probe` are MiB that the figures of arbiter and probe show beside chunks and context after a
    /// chunk of 512 MiB was lent.
    fn found(made: i64, probe: u64) -> ProbeStep {
        let made = Some((CHUNKS + SIZES.context).saturating_add_signed(made * MIB.cast_signed()));
        let mut prober = new_probe();
        _ = prober.takes(7, false);
        assert_eq!(prober.evaluate(reading(made, Some(Some(510 * MIB)))), ProbeStep::Lend(7, 512 * MIB));
        _ = prober.takes(8, false);
        prober.evaluate(reading(made, Some(Some((510 + probe) * MIB))))
    }

    #[test]
    fn booking_is_found_for_owner_importer_both_and_nowhere() {
        for noise in [0, 60] {
            assert_eq!(found(noise, noise.cast_unsigned()), ProbeStep::Found(Booking::Owner));
            assert_eq!(found(noise - 512, 512 + noise.cast_unsigned()), ProbeStep::Found(Booking::Importer));
            assert_eq!(found(noise, 512 - noise.cast_unsigned()), ProbeStep::Found(Booking::Both));
            assert_eq!(found(noise - (100 << 10), 0), ProbeStep::Found(Booking::Nowhere));
        }
        assert_eq!(found(0, 256), ProbeStep::Wait, "it may be on its way");
    }

    #[test]
    fn sample_while_custody_grows_or_shrinks_by_as_much_as_the_chunk_is_ignored_twice_at_most() {
        let mut prober = new_probe();
        let own = Some(Some(510 * MIB));
        _ = prober.takes(7, false);
        let growing = ProbeReading { chunks: [0, CHUNKS], ..reading(None, own) };
        assert_eq!(prober.evaluate(growing), ProbeStep::Lend(7, 512 * MIB), "the own figure is clear");
        _ = prober.takes(8, false);
        // Importers are booked, and the arbiter has made 512 MiB more since the last look.
        let imported = reading(Some(CHUNKS + SIZES.context - 512 * MIB), Some(Some(1022 * MIB)));
        for chunks in [[CHUNKS - 512 * MIB, CHUNKS], [CHUNKS, CHUNKS - 512 * MIB]] {
            assert_eq!(prober.evaluate(ProbeReading { chunks, ..imported }), ProbeStep::Wait);
        }
        assert_eq!(prober.evaluate(imported), ProbeStep::Found(Booking::Importer));

        let mut prober = new_probe();
        _ = prober.takes(7, false);
        _ = prober.evaluate(growing);
        _ = prober.takes(8, false);
        let restless = ProbeReading { chunks: [CHUNKS, CHUNKS - 512 * MIB], ..imported };
        let steps: Vec<_> = (0..LOOKS).map(|_| prober.evaluate(restless)).collect();
        assert_eq!(steps, [ProbeStep::Wait, ProbeStep::Wait, ProbeStep::Found(Booking::Both)]);
    }

    #[test]
    fn sample_that_began_before_the_take_is_ignored() {
        let made = Some(CHUNKS + SIZES.context);
        let mut prober = new_probe();
        assert_eq!(
            prober.evaluate(reading(made, Some(Some(510 * MIB)))),
            ProbeStep::Wait,
            "it has not asked yet"
        );
        _ = prober.takes(7, true);
        assert_eq!(prober.evaluate(reading(made, Some(Some(510 * MIB)))), ProbeStep::Wait);
        assert_eq!(prober.evaluate(reading(made, Some(Some(510 * MIB)))), ProbeStep::Lend(7, 512 * MIB));
        _ = prober.takes(8, true);
        assert_eq!(prober.evaluate(reading(made, Some(Some(510 * MIB)))), ProbeStep::Wait);
        assert_eq!(prober.evaluate(reading(made, Some(Some(1022 * MIB)))), ProbeStep::Found(Booking::Both));
    }

    #[test]
    fn figures_that_are_absent_or_unclear_are_not_used() {
        let made = Some(CHUNKS + SIZES.context);
        for probe in [None, Some(0), Some(100 * MIB)] {
            let mut prober = new_probe();
            _ = prober.takes(7, false);
            assert_eq!(prober.evaluate(reading(made, None)), ProbeStep::Wait, "it is not listed yet");
            let looks: Vec<ProbeStep> =
                (0..LOOKS).map(|_| prober.evaluate(reading(made, Some(probe)))).collect();
            assert_eq!(looks.last(), Some(&ProbeStep::Found(Booking::Nowhere)), "{probe:?}");
            assert!(looks.iter().rev().skip(1).all(|next| *next == ProbeStep::Wait));
        }
        assert_eq!(Booking::Nowhere.figures(), Figures::Unused);
    }

    #[test]
    fn probe_that_does_not_book_gets_its_chunk_at_once() {
        let mut prober = BookingProbe::new((WorkerId(1), 9), VmKey { vm: NO_VM, epoch: 1 }, SIZES, false, 0);
        assert_eq!(prober.takes(7, true), ProbeStep::Lend(7, UNIT));
        let all = reading(Some(CHUNKS + SIZES.context), Some(Some(510 * MIB)));
        assert_eq!(prober.evaluate(all), ProbeStep::Wait, "a look shows nothing");
        assert_eq!(prober.takes(8, false), ProbeStep::Used);
        assert_eq!(prober.takes(9, false), ProbeStep::Wait);
    }

    #[test]
    fn probe_chunk_is_more_than_four_times_the_margin() {
        for margin in [2, 4, 16, 64] {
            let sizes = Sizes { context: 0, margin: margin * MIB };
            assert!(sizes.chunk() > 4 * sizes.margin && sizes.quota() >= sizes.chunk() + sizes.margin);
        }
    }
}
