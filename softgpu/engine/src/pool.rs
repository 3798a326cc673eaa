//! The worker threads that execute launches.
//!
//! The calling thread works on its own launch; idle workers of the pool join it. They use the launch only while its caller waits.

#![expect(
    unsafe_code,
    reason = "a launch is lent to pool threads for the duration of a call; signal masks need libc"
)]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};

use crate::api::{Fault, FaultKind};
use crate::exec::cta::Cta;
use crate::exec::grid::Grid;
use crate::exec::worker::BlockWorker;
use crate::launch::Launch;

/// A pool of worker threads shared by all launches of the process.
pub struct Pool {
    threads: usize,
    start: Once,
    shared: Arc<Shared>,
}

struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Arc<Job>>,
    closed: bool,
}

/// A launch that workers may join.
struct Job {
    /// Borrowed from the frame of the caller, which does not return before `state` shows that no worker is inside.
    work: &'static (dyn Fn() + Sync),
    state: Mutex<State>,
    left: Condvar,
}

#[derive(Default)]
struct State {
    inside: usize,
    over: bool,
}

thread_local! {
    /// Blocks with their old contents: the memory of a device is not cleared between its users.
    static SPARE: RefCell<Vec<Cta>> = const { RefCell::new(Vec::new()) };
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// Creates a pool of `threads` workers (at least one, the caller of [`Pool::run`] included). They start on first use, with
    /// all signals blocked.
    pub fn new(threads: usize) -> Pool {
        let shared = Arc::new(Shared { queue: Mutex::new(Queue::default()), wake: Condvar::new() });
        Pool { threads: threads.max(1), start: Once::new(), shared }
    }

    /// Executes a launch and returns when it is complete. Several threads may call this at once.
    ///
    /// # Errors
    /// The first fault of the launch.
    pub fn run(&self, launch: &Launch<'_>) -> Result<(), Fault> {
        let nowhere =
            Fault { kind: FaultKind::LaunchFailed, cta: [0; 3], thread: [0; 3], address: 0, line: 0 };
        // The text of a refused kernel was not lowered: its first instruction is illegal.
        let kernel = launch.module.module().kernels().get(launch.kernel);
        if let Some(refusal) = kernel.and_then(|kernel| kernel.refusal.as_ref()) {
            return Err(Fault { kind: FaultKind::IllegalInstruction, line: refusal.line, ..nowhere });
        }
        let Some(grid) = Grid::new(launch) else { return Err(nowhere) };
        let work = || {
            let spare = SPARE.with(RefCell::take);
            match catch_unwind(AssertUnwindSafe(|| BlockWorker::new(&grid, spare).run())) {
                Ok(spare) => SPARE.with(|s| *s.borrow_mut() = spare),
                Err(_) => grid.fail(nowhere),
            }
        };
        let helpers = usize::try_from(grid.width()).unwrap_or(usize::MAX).min(self.threads) - 1;
        if helpers == 0 {
            work();
        } else {
            self.lend(&work, helpers);
        }
        grid.result()
    }

    /// Runs `work` here and on up to `helpers` workers. No worker is inside it when this returns.
    fn lend(&self, work: &(dyn Fn() + Sync), helpers: usize) {
        self.start.call_once(|| {
            for n in 1..self.threads {
                let shared = Arc::clone(&self.shared);
                let thread = std::thread::Builder::new().name(format!("softgpu-{n}"));
                // If threads cannot start, the callers do all the work.
                let _ = thread.spawn(move || serve(&shared));
            }
        });
        // SAFETY: only the lifetime changes; `Over` below waits until no worker is inside, also when `work` panics.
        let work_static: &'static (dyn Fn() + Sync) = unsafe { core::mem::transmute(work) };
        let job =
            Arc::new(Job { work: work_static, state: Mutex::new(State::default()), left: Condvar::new() });
        {
            let mut queue = lock(&self.shared.queue);
            queue.jobs.extend((0..helpers).map(|_| Arc::clone(&job)));
        }
        self.shared.wake.notify_all();
        let _over = Over { job: &job, shared: &self.shared };
        work();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.shared.queue).closed = true;
        self.shared.wake.notify_all();
    }
}

/// Ends a job: lets no further worker enter, and waits for those inside.
struct Over<'a> {
    job: &'a Arc<Job>,
    shared: &'a Shared,
}

impl Drop for Over<'_> {
    fn drop(&mut self) {
        lock(&self.shared.queue).jobs.retain(|j| !Arc::ptr_eq(j, self.job));
        let mut state = lock(&self.job.state);
        state.over = true;
        while state.inside > 0 {
            state = self.job.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn serve(shared: &Shared) {
    block_signals();
    loop {
        let job = {
            let mut queue = lock(&shared.queue);
            loop {
                if queue.closed {
                    return;
                }
                match queue.jobs.pop_front() {
                    Some(job) => break job,
                    None => queue = shared.wake.wait(queue).unwrap_or_else(PoisonError::into_inner),
                }
            }
        };
        {
            let mut state = lock(&job.state);
            if state.over {
                continue;
            }
            state.inside += 1;
        }
        // `work` catches panics itself; this keeps the count right in any case.
        let _ = catch_unwind(AssertUnwindSafe(|| (job.work)()));
        lock(&job.state).inside -= 1;
        job.left.notify_all();
    }
}

fn block_signals() {
    // SAFETY: a signal set is plain data; zero bytes are a valid value.
    let mut all: libc::sigset_t = unsafe { core::mem::zeroed() };
    // SAFETY: the pointer is to a local signal set.
    unsafe { libc::sigfillset(&raw mut all) };
    // SAFETY: the set is initialised; a null pointer means that the old mask is not returned.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, core::ptr::null_mut()) };
}
