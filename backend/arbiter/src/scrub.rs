//! The scrubber thread: it does all driver work that takes time. It scrubs, and leaves a receipt for each chunk.
//!
//! It has one task at a time and owns the chunks of that task until it is done, so no other thread can use them meanwhile.

use crate::{
    custody::{Order, Outcome, Task},
    ids::{ChunkId, Class},
    receipts::Receipts,
    unit::{Piece, Taken, Unit},
};
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::{AsFd as _, BorrowedFd, OwnedFd},
    io::Errno,
};
use sluice_driver::Code;
use sluice_messages::control::Verify;
use std::{
    collections::BTreeSet,
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

/// What the thread says.
#[derive(Debug)]
pub enum News {
    /// A task is done.
    Done(Done),
    /// The device works.
    Probed,
    /// The driver fails: nothing can be proven of the unit's memory any more.
    Failed(Fault),
}

/// How the driver fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// It does not say what is free.
    #[error("the driver does not say what is free: CUresult {0}")]
    Free(Code),
    /// The device does not clear a chunk of the arbiter's own.
    #[error("the device fails a probe: CUresult {0}")]
    Probe(Code),
    /// It fails to clear one chunk after the other.
    #[error("the driver fails to clear one chunk after the other, the last one with CUresult {0}")]
    Scrubs(Code),
}

/// What the thread is asked for.
#[derive(Debug)]
enum Job {
    Work(Work),
    Probe,
}

/// How often the driver is asked what is free before that counts as a failure, and how long between.
const TRIES: (u32, Duration) = (3, Duration::from_millis(10));
/// Scrubs of different chunks that may fail one after the other by the driver's word.
const FAILED_SCRUBS: u32 = 3;

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
    work: Sender<Job>,
    news: Receiver<News>,
    wake: Arc<OwnedFd>,
}

impl Hand {
    /// Starts the thread.
    ///
    /// # Errors
    /// The kernel's, when it has no descriptor or thread for us.
    pub fn start(unit: Unit, rules: Rules) -> Result<Hand, std::io::Error> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (work, jobs) = channel();
        let (results, news) = channel();
        let bell = Arc::clone(&wake);
        thread::Builder::new().name("scrubber".to_owned()).spawn(move || {
            let mut worker = Scrubber { unit, rules, failed: BTreeSet::new(), failures: 0 };
            if let Err(code) = worker.unit.enter() {
                tracing::error!(code, "the scrubber has no context");
                std::process::exit(1);
            }
            for job in jobs {
                let news = match job {
                    Job::Work(work) => worker.work(work).map_or_else(News::Failed, News::Done),
                    Job::Probe => worker.probe().map_or_else(News::Failed, |()| News::Probed),
                };
                if results.send(news).is_err() {
                    return;
                }
                ring(bell.as_fd());
            }
        })?;
        Ok(Hand { work, news, wake })
    }

    /// What becomes readable when something is done.
    #[must_use]
    pub fn wake(&self) -> BorrowedFd<'_> {
        (*self.wake).as_fd()
    }

    /// Hands a task over.
    pub fn submit(&self, work: Work) {
        self.ask(Job::Work(work));
    }

    /// Has the device tried, after what was handed over before.
    pub fn probe(&self) {
        self.ask(Job::Probe);
    }

    fn ask(&self, job: Job) {
        // The thread ends only with the process.
        if self.work.send(job).is_err() {
            tracing::error!("the scrubber is gone");
            std::process::exit(1);
        }
    }

    /// What the thread says.
    pub fn news(&self) -> Option<News> {
        let mut count = [0; 8];
        match rustix::io::read(&*self.wake, &mut count) {
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => tracing::error!(%error, "the scrubber's bell is broken"),
        }
        self.news.try_recv().ok()
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
    /// Chunks that the driver failed to clear since it last cleared any, and how often it failed for others than before.
    failed: BTreeSet<ChunkId>,
    failures: u32,
}

impl Scrubber {
    fn probe(&mut self) -> Result<(), Fault> {
        self.unit.probe().map_err(Fault::Probe)
    }

    fn work(&mut self, work: Work) -> Result<Done, Fault> {
        let Work { task, pieces } = work;
        let done = |outcome, pieces| Done { outcome, pieces, scrubbed: None, receipts_lost: 0 };
        Ok(match task {
            Task::Scrub(orders) => {
                let started = Instant::now();
                let results = self.scrub(&orders, &pieces)?;
                let bytes = orders.iter().zip(&pieces).map(|(_, piece)| piece.bytes()).sum();
                let scrubbed = self.rules.scrub.then(|| (started.elapsed(), bytes));
                let receipts_lost = self.rules.receipts.take_lost();
                Done { outcome: Outcome::Scrubbed(results), pieces, scrubbed, receipts_lost }
            }
            Task::Release(_) => {
                self.release(pieces);
                done(Outcome::Released { free: self.free()? }, Vec::new())
            }
            Task::Take { leave, most } => {
                self.free()?;
                let Taken { pieces, failed } = self.unit.take_free(leave, most).map_err(Fault::Free)?;
                if let Some(code) = failed {
                    tracing::error!(
                        code,
                        chunks = pieces.len(),
                        "the driver fails while the unit's memory is taken"
                    );
                }
                let made = pieces.iter().map(Piece::class).collect();
                done(Outcome::Taken { made, free: self.free()? }, pieces)
            }
            Task::Remake { into, .. } => {
                let count = pieces.iter().map(Piece::bytes).sum::<u64>() / into.bytes();
                self.release(pieces);
                let pieces = self.unit.create_many(into, count);
                let made = pieces.iter().map(Piece::class).collect();
                done(Outcome::Remade { made, free: self.free()? }, pieces)
            }
            Task::Move { .. } => {
                let classes: Vec<Class> = pieces.iter().map(Piece::class).collect();
                let bytes: u64 = pieces.iter().map(Piece::bytes).sum();
                let before = self.free()?;
                self.release(pieces);
                // What is missing some process holds still. No chunks are made for it, of memory that is others'.
                let back = self.free()?.saturating_sub(before).min(bytes);
                let pieces = self.unit.create_within(&classes, back);
                let made = pieces.iter().map(Piece::class).collect();
                done(Outcome::Moved { back, made, free: self.free()? }, pieces)
            }
            Task::Measure => done(Outcome::Measured { free: self.free()? }, Vec::new()),
        })
    }

    /// What is free. A driver that does not say so has failed: no other number would do.
    fn free(&self) -> Result<u64, Fault> {
        let (tries, pause) = TRIES;
        let mut last = 0;
        for _ in 0..tries {
            match self.unit.free() {
                Ok(free) => return Ok(free),
                Err(code) => {
                    tracing::error!(code, "the driver does not say what is free");
                    last = code;
                    thread::sleep(pause);
                }
            }
        }
        Err(Fault::Free(last))
    }

    fn release(&mut self, pieces: Vec<Piece>) {
        for piece in pieces {
            if let Err(code) = self.unit.release(piece) {
                tracing::error!(code, "a chunk is lost to the driver");
            }
        }
    }

    /// Clears all of them, then reads back. A failed call leaves all of them dirty: nobody knows which it was.
    fn scrub(&mut self, orders: &[Order], pieces: &[Piece]) -> Result<Vec<(ChunkId, bool)>, Fault> {
        if !self.rules.scrub {
            return Ok(orders.iter().map(|order| (order.chunk, true)).collect());
        }
        let cleared =
            pieces.iter().try_for_each(|piece| self.unit.clear(piece)).and_then(|()| self.unit.wait());
        let verified = cleared.and_then(|()| self.unit.verify(pieces, self.rules.verify));
        let verified = match verified {
            Ok(verified) => {
                self.failed.clear();
                self.failures = 0;
                verified
            }
            Err(code) => {
                tracing::error!(
                    code,
                    chunks = orders.len(),
                    "the driver fails to clear chunks or to read them back"
                );
                self.scrub_failed(orders, code)?;
                Vec::new()
            }
        };
        let mut receipts = String::new();
        let mut results = Vec::with_capacity(orders.len());
        for (number, (order, piece)) in orders.iter().zip(pieces).enumerate() {
            let clean = verified.get(number) == Some(&true);
            self.receipt(&mut receipts, order, piece, clean);
            results.push((order.chunk, clean));
        }
        self.rules.receipts.write(receipts.as_bytes());
        Ok(results)
    }

    /// Whether it is the chunks, or the device. A worker cannot bring a failed call about: it has a context of its own.
    fn scrub_failed(&mut self, orders: &[Order], code: Code) -> Result<(), Fault> {
        self.probe()?;
        let known = orders.iter().any(|order| self.failed.contains(&order.chunk));
        self.failed.extend(orders.iter().map(|order| order.chunk));
        self.failures += u32::from(!known);
        if self.failures >= FAILED_SCRUBS { Err(Fault::Scrubs(code)) } else { Ok(()) }
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
