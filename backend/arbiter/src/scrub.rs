//! The scrubber thread: it does all driver work that takes time. It scrubs, and writes a receipt for each chunk.
//!
//! It has one task at a time and owns the task's chunks until it is done, so no other thread can use them meanwhile.

use crate::{
    custody::{ScrubOrder, Task, TaskOutcome},
    ids::{ChunkId, Class},
    receipts::Receipts,
    unit::{OpenUnit, Piece, TakenMemory},
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

/// A task and its chunks.
#[derive(Debug)]
pub struct ScrubWork {
    /// The task to do.
    pub task: Task,
    /// The chunks, in the task's order.
    pub pieces: Vec<Piece>,
}

/// A task's result.
#[derive(Debug)]
pub struct Done {
    /// The task's outcome.
    pub outcome: TaskOutcome,
    /// The chunks that exist now: those that were scrubbed, or new ones.
    pub pieces: Vec<Piece>,
    /// The time that scrubbing took, and the bytes scrubbed.
    pub scrubbed: Option<(Duration, u64)>,
    /// Receipts that could not be written.
    pub receipts_lost: u64,
}

/// A message of the thread.
#[derive(Debug)]
pub enum News {
    /// A task is done.
    Done(Done),
    /// The device passed the probe.
    Probed,
    /// The driver fails, so the state of the unit's memory can no longer be proven.
    Failed(Fault),
}

/// A failure of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The driver does not report its free memory.
    #[error("the driver does not report its free memory: CUresult {0}")]
    Free(Code),
    /// The device cannot clear a chunk of the arbiter's own.
    #[error("the device failed a probe: CUresult {0}")]
    Probe(Code),
    /// The driver fails to clear several chunks in a row.
    #[error("the driver failed to clear several chunks in a row, the last one with CUresult {0}")]
    Scrubs(Code),
}

/// A job for the thread.
#[derive(Debug)]
enum ScrubJob {
    Work(ScrubWork),
    Probe,
}

/// Queries of free memory before the driver counts as failed, and the pause between them.
const TRIES: (u32, Duration) = (3, Duration::from_millis(10));
/// Scrubs of different chunks that may fail in a row with an error of the driver.
const FAILED_SCRUBS: u32 = 3;

/// The rules of scrubbing.
#[derive(Debug)]
pub struct Rules {
    /// The unit's number, for the log.
    pub unit: u32,
    /// True if chunks are scrubbed at all.
    pub scrub: bool,
    /// The part of each chunk that is read back.
    pub verify: Verify,
    /// The files for receipts.
    pub receipts: Receipts,
}

/// The loop's handle of the thread.
#[derive(Debug)]
pub struct ScrubberThread {
    work: Sender<ScrubJob>,
    news: Receiver<News>,
    wake: Arc<OwnedFd>,
}

impl ScrubberThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// The kernel's error if it cannot create a descriptor or a thread.
    pub fn start(unit: OpenUnit, rules: Rules) -> Result<ScrubberThread, std::io::Error> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (work, jobs) = channel();
        let (results, news) = channel();
        let wake_fd = Arc::clone(&wake);
        thread::Builder::new().name("scrubber".to_owned()).spawn(move || {
            let mut worker = Scrubber { unit, rules, failed: BTreeSet::new(), failures: 0 };
            if let Err(code) = worker.unit.enter() {
                tracing::error!(code, "the scrubber cannot enter the context");
                std::process::exit(1);
            }
            for job in jobs {
                let news = match job {
                    ScrubJob::Work(work) => worker.work(work).map_or_else(News::Failed, News::Done),
                    ScrubJob::Probe => worker.probe().map_or_else(News::Failed, |()| News::Probed),
                };
                if results.send(news).is_err() {
                    return;
                }
                ring(wake_fd.as_fd());
            }
        })?;
        Ok(ScrubberThread { work, news, wake })
    }

    /// A descriptor that becomes readable when a message is there.
    #[must_use]
    pub fn wake(&self) -> BorrowedFd<'_> {
        (*self.wake).as_fd()
    }

    /// Hands a task over.
    pub fn submit(&self, work: ScrubWork) {
        self.ask(ScrubJob::Work(work));
    }

    /// Requests a probe of the device, after the work submitted before.
    pub fn probe(&self) {
        self.ask(ScrubJob::Probe);
    }

    fn ask(&self, job: ScrubJob) {
        // The thread ends only with the process.
        if self.work.send(job).is_err() {
            tracing::error!("the scrubber thread has ended");
            std::process::exit(1);
        }
    }

    /// The next message of the thread.
    pub fn news(&self) -> Option<News> {
        let mut count = [0; 8];
        match rustix::io::read(&*self.wake, &mut count) {
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => tracing::error!(%error, "cannot read the scrubber's eventfd"),
        }
        self.news.try_recv().ok()
    }
}

fn ring(wake_fd: BorrowedFd<'_>) {
    if let Err(error) = rustix::io::write(wake_fd, &1_u64.to_le_bytes()) {
        tracing::error!(%error, "cannot write the eventfd that wakes the loop");
    }
}

struct Scrubber {
    unit: OpenUnit,
    rules: Rules,
    /// Chunks that the driver failed to clear since it last cleared any, and the number of failures with chunks not in this set.
    failed: BTreeSet<ChunkId>,
    failures: u32,
}

impl Scrubber {
    fn probe(&mut self) -> Result<(), Fault> {
        self.unit.probe().map_err(Fault::Probe)
    }

    fn work(&mut self, work: ScrubWork) -> Result<Done, Fault> {
        let ScrubWork { task, pieces } = work;
        let done = |outcome, pieces| Done { outcome, pieces, scrubbed: None, receipts_lost: 0 };
        Ok(match task {
            Task::Scrub(orders) => {
                let started = Instant::now();
                let results = self.scrub(&orders, &pieces)?;
                let bytes = orders.iter().zip(&pieces).map(|(_, piece)| piece.bytes()).sum();
                let scrubbed = self.rules.scrub.then(|| (started.elapsed(), bytes));
                let receipts_lost = self.rules.receipts.take_lost();
                Done { outcome: TaskOutcome::Scrubbed(results), pieces, scrubbed, receipts_lost }
            }
            Task::Release(_) => {
                self.release(pieces);
                done(TaskOutcome::Released { free: self.free()? }, Vec::new())
            }
            Task::Take { leave, most } => {
                self.free()?;
                let TakenMemory { pieces, failed } = self.unit.take_free(leave, most).map_err(Fault::Free)?;
                if let Some(code) = failed {
                    tracing::error!(
                        code,
                        chunks = pieces.len(),
                        "the driver failed while it took the unit's memory"
                    );
                }
                let made = pieces.iter().map(Piece::class).collect();
                done(TaskOutcome::Taken { made, free: self.free()? }, pieces)
            }
            Task::Remake { into, .. } => {
                let count = pieces.iter().map(Piece::bytes).sum::<u64>() / into.bytes();
                self.release(pieces);
                let pieces = self.unit.create_many(into, count);
                let made = pieces.iter().map(Piece::class).collect();
                done(TaskOutcome::Remade { made, free: self.free()? }, pieces)
            }
            Task::Move { .. } => {
                let classes: Vec<Class> = pieces.iter().map(Piece::class).collect();
                let bytes: u64 = pieces.iter().map(Piece::bytes).sum();
                let before = self.free()?;
                self.release(pieces);
                // Some process still holds the missing bytes. No chunks replace them, for these would be made of other processes' memory.
                let back = self.free()?.saturating_sub(before).min(bytes);
                let pieces = self.unit.create_within(&classes, back);
                let made = pieces.iter().map(Piece::class).collect();
                done(TaskOutcome::Moved { back, made, free: self.free()? }, pieces)
            }
            Task::Measure => done(TaskOutcome::Measured { free: self.free()? }, Vec::new()),
        })
    }

    /// The free bytes. A driver that does not report them has failed: no other figure can replace them.
    fn free(&self) -> Result<u64, Fault> {
        let (tries, pause) = TRIES;
        let mut last = 0;
        for _ in 0..tries {
            match self.unit.free() {
                Ok(free) => return Ok(free),
                Err(code) => {
                    tracing::error!(code, "the driver does not report its free memory");
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
                tracing::error!(code, "cannot release a chunk; its memory is lost");
            }
        }
    }

    /// Clears all of them, then reads back. A failed call leaves all of them dirty, because it does not name the chunk.
    fn scrub(&mut self, orders: &[ScrubOrder], pieces: &[Piece]) -> Result<Vec<(ChunkId, bool)>, Fault> {
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
                    "the driver failed to clear chunks or to read them back"
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

    /// Decides between a fault of the chunks and one of the device. A worker cannot cause a failed call: it has its own context.
    fn scrub_failed(&mut self, orders: &[ScrubOrder], code: Code) -> Result<(), Fault> {
        self.probe()?;
        let known = orders.iter().any(|order| self.failed.contains(&order.chunk));
        self.failed.extend(orders.iter().map(|order| order.chunk));
        self.failures += u32::from(!known);
        if self.failures >= FAILED_SCRUBS { Err(Fault::Scrubs(code)) } else { Ok(()) }
    }

    /// Appends one line of JSON.
    fn receipt(&self, log: &mut String, order: &ScrubOrder, piece: &Piece, clean: bool) {
        let verify = match self.rules.verify {
            Verify::Sampled => "sampled",
            Verify::All => "all",
        };
        let (vm, vm_epoch) = order.vm.map_or((0, 0), |vm| (vm.vm, vm.epoch));
        // Writing to a String cannot fail.
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
