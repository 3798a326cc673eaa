//! The hand: the thread in which everything of the driver happens that takes time. It scrubs, and leaves a receipt for
//! each chunk.
//!
//! It has one task at a time and owns the chunks of that task until it is done, so nobody else can use them meanwhile.

use crate::{
    custody::{Order, Outcome, Task},
    ids::{ChunkId, Class},
    receipts::Receipts,
    unit::{Piece, Unit},
};
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::{AsFd as _, BorrowedFd, OwnedFd},
    io::Errno,
};
use sluice_protocol::control::Verify;
use std::{
    fmt::Write as _,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

/// A task, and the chunks it is about.
#[derive(Debug)]
pub struct Work {
    /// What to do.
    pub task: Task,
    /// The chunks, in the task's order.
    pub pieces: Vec<Piece>,
}

/// What became of it, and the chunks there are now: those that were scrubbed, or new ones.
#[derive(Debug)]
pub struct Done {
    /// What became of it.
    pub outcome: Outcome,
    /// Chunks.
    pub pieces: Vec<Piece>,
    /// How long it took, and how many bytes it scrubbed.
    pub scrubbed: Option<(Duration, u64)>,
    /// Receipts that could not be written.
    pub receipts_lost: u64,
}

/// How scrubbing is done.
#[derive(Debug)]
pub struct Rules {
    /// The placement unit, for the log.
    pub unit: u32,
    /// Whether to scrub at all.
    pub scrub: bool,
    /// How much is read back.
    pub verify: Verify,
    /// Where the receipts go.
    pub receipts: Receipts,
}

/// The thread, seen from the loop.
#[derive(Debug)]
pub struct Hand {
    work: Sender<Work>,
    done: Receiver<Done>,
    wake: Arc<OwnedFd>,
}

impl Hand {
    /// Starts the thread.
    ///
    /// # Errors
    /// The kernel's, when it has no descriptor or thread for us.
    pub fn start(unit: Unit, rules: Rules) -> Result<Hand, std::io::Error> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (work, tasks) = channel();
        let (results, done) = channel();
        let bell = Arc::clone(&wake);
        thread::Builder::new().name("scrubber".to_owned()).spawn(move || {
            let mut worker = Scrubber { unit, rules };
            if let Err(code) = worker.unit.enter() {
                tracing::error!(code, "the scrubber has no context");
                std::process::exit(1);
            }
            for work in tasks {
                if results.send(worker.work(work)).is_err() {
                    return;
                }
                ring(bell.as_fd());
            }
        })?;
        Ok(Hand { work, done, wake })
    }

    /// What becomes readable when something is done.
    #[must_use]
    pub fn wake(&self) -> BorrowedFd<'_> {
        (*self.wake).as_fd()
    }

    /// Hands a task over.
    pub fn submit(&self, work: Work) {
        // The thread ends only with the process.
        if self.work.send(work).is_err() {
            tracing::error!("the scrubber is gone");
            std::process::exit(1);
        }
    }

    /// What is done.
    pub fn done(&self) -> Option<Done> {
        let mut count = [0; 8];
        match rustix::io::read(&*self.wake, &mut count) {
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => tracing::error!(%error, "the scrubber's bell is broken"),
        }
        self.done.try_recv().ok()
    }
}

fn ring(bell: BorrowedFd<'_>) {
    if let Err(error) = rustix::io::write(bell, &1_u64.to_le_bytes()) {
        tracing::error!(%error, "cannot wake the loop");
    }
}

struct Scrubber {
    unit: Unit,
    rules: Rules,
}

impl Scrubber {
    fn work(&mut self, work: Work) -> Done {
        let Work { task, pieces } = work;
        let done = |outcome, pieces| Done { outcome, pieces, scrubbed: None, receipts_lost: 0 };
        match task {
            Task::Scrub(orders) => {
                let started = Instant::now();
                let results = self.scrub(&orders, &pieces);
                let bytes = orders.iter().zip(&pieces).map(|(_, piece)| piece.bytes()).sum();
                let scrubbed = self.rules.scrub.then(|| (started.elapsed(), bytes));
                let receipts_lost = self.rules.receipts.take_lost();
                Done { outcome: Outcome::Scrubbed(results), pieces, scrubbed, receipts_lost }
            }
            Task::Release(_) => {
                self.release(pieces);
                done(Outcome::Released { free: self.free() }, Vec::new())
            }
            Task::Take { leave, most } => {
                let pieces = self.unit.take_free(leave, most).unwrap_or_else(|code| {
                    tracing::error!(code, "cannot take the unit's memory");
                    Vec::new()
                });
                let made = pieces.iter().map(Piece::class).collect();
                done(Outcome::Taken { made, free: self.free() }, pieces)
            }
            Task::Remake { into, .. } => {
                let count = pieces.iter().map(Piece::bytes).sum::<u64>() / into.bytes();
                self.release(pieces);
                let pieces = self.unit.create_many(into, count);
                let made = pieces.iter().map(Piece::class).collect();
                done(Outcome::Remade { made, free: self.free() }, pieces)
            }
            Task::Move { .. } => {
                let classes: Vec<Class> = pieces.iter().map(Piece::class).collect();
                let bytes: u64 = pieces.iter().map(Piece::bytes).sum();
                let before = self.free();
                self.release(pieces);
                // What is missing some process holds still. No chunks are made for it, of memory that is others'.
                let back = self.free().saturating_sub(before).min(bytes);
                let pieces = self.unit.create_within(&classes, back);
                let made = pieces.iter().map(Piece::class).collect();
                done(Outcome::Moved { back, made, free: self.free() }, pieces)
            }
            Task::Measure => done(Outcome::Measured { free: self.free() }, Vec::new()),
        }
    }

    fn free(&self) -> u64 {
        self.unit.free().unwrap_or_else(|code| {
            tracing::error!(code, "the driver does not say what is free");
            0
        })
    }

    fn release(&mut self, pieces: Vec<Piece>) {
        for piece in pieces {
            if let Err(code) = self.unit.release(piece) {
                tracing::error!(code, "a chunk is lost to the driver");
            }
        }
    }

    /// Clears all of them, then reads back. A failed call leaves all of them dirty: nobody knows which it was.
    fn scrub(&mut self, orders: &[Order], pieces: &[Piece]) -> Vec<(ChunkId, bool)> {
        if !self.rules.scrub {
            return orders.iter().map(|order| (order.chunk, true)).collect();
        }
        let cleared =
            pieces.iter().try_for_each(|piece| self.unit.clear(piece)).and_then(|()| self.unit.wait());
        let verified = cleared.and_then(|()| self.unit.verify(pieces, self.rules.verify));
        let verified = verified.unwrap_or_else(|code| {
            tracing::error!(code, "what was scrubbed cannot be read back");
            Vec::new()
        });
        let mut receipts = String::new();
        let mut results = Vec::with_capacity(orders.len());
        for (number, (order, piece)) in orders.iter().zip(pieces).enumerate() {
            let clean = verified.get(number) == Some(&true);
            self.receipt(&mut receipts, order, piece, clean);
            results.push((order.chunk, clean));
        }
        self.rules.receipts.write(receipts.as_bytes());
        results
    }

    /// One line of JSON.
    fn receipt(&self, log: &mut String, order: &Order, piece: &Piece, clean: bool) {
        let verify = match self.rules.verify {
            Verify::Sampled => "sampled",
            Verify::All => "all",
        };
        let (vm, vm_epoch) = order.vm.map_or((0, 0), |vm| (vm.vm, vm.epoch));
        // Writing to a string cannot fail.
        let _ = writeln!(
            log,
            "{{\"unit\":{},\"chunk\":{},\"epoch\":{},\"vm\":{vm},\"vm_epoch\":{vm_epoch},\"bytes\":{},\"verify\":\"{verify}\",\
             \"verified\":{clean},\"reason\":\"{}\"}}",
            self.rules.unit,
            order.chunk.0,
            order.epoch,
            piece.bytes(),
            order.reason.name(),
        );
    }
}
