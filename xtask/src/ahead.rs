//! Builds of later stages, made while tests wait: tests leave a good part of the processors' time unused.
//!
//! The builds have the scheduler's class for idle time, so that no test loses a processor to them. Nothing depends on their success: the
//! stage makes its build itself, finds most of it done, and reports the errors.

use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

/// A build and the name of its stage.
pub(crate) type Build = (&'static str, Command);

/// Builds that run one after the other until they are all made, or until [`Self::end`].
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    state: Arc<Mutex<State>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct State {
    /// The running build's processes.
    group: Option<Pid>,
    paused: bool,
    ended: bool,
    made: Vec<&'static str>,
}

impl State {
    fn signal(&self, signal: Signal) {
        if let Some(group) = self.group {
            // A group that has just ended needs no signal.
            kill_process_group(group, signal).ok();
        }
    }
}

impl Ahead {
    /// Starts the first build.
    pub(crate) fn start(builds: Vec<Build>) -> Self {
        let state = Arc::new(Mutex::new(State::default()));
        let shared = Arc::clone(&state);
        let thread = thread::spawn(move || {
            for (name, build) in &builds {
                if !make(&shared, name, build) {
                    return;
                }
            }
        });
        Self { state, thread: Some(thread) }
    }

    /// Calls `measured` while the running build is stopped.
    pub(crate) fn paused<T>(&self, measured: impl FnOnce() -> T) -> T {
        let pause = |paused, signal| {
            let mut state = lock(&self.state);
            state.paused = paused;
            state.signal(signal);
        };
        pause(true, Signal::STOP);
        let result = measured();
        pause(false, Signal::CONT);
        result
    }

    /// Ends the running build and starts no other; the names of the builds that were made.
    pub(crate) fn end(mut self) -> Vec<&'static str> {
        self.stop();
        std::mem::take(&mut lock(&self.state).made)
    }

    fn stop(&mut self) {
        {
            let mut state = lock(&self.state);
            state.ended = true;
            state.signal(Signal::TERM);
            state.signal(Signal::CONT);
        }
        if let Some(thread) = self.thread.take() {
            // Its panic was printed, and no stage depends on its builds.
            thread.join().ok();
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Makes one build; false if no other is to follow.
fn make(state: &Mutex<State>, name: &'static str, build: &Command) -> bool {
    let mut child = {
        let mut state = lock(state);
        if state.ended {
            return false;
        }
        let Ok(child) = in_idle_time(build).spawn() else { return true };
        state.group = Some(Pid::from_child(&child));
        if state.paused {
            state.signal(Signal::STOP);
        }
        child
    };
    wait_unreaped(&child);
    let mut state = lock(state);
    // From here on the number may be that of another process.
    state.group = None;
    if child.wait().is_ok_and(|status| status.success()) {
        state.made.push(name);
    }
    !state.ended
}

/// Waits until the process ends; it keeps its number.
fn wait_unreaped(child: &Child) {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while waitid(WaitId::Pid(Pid::from_child(child)), options).is_err_and(|error| error == Errno::INTR) {}
}

fn in_idle_time(build: &Command) -> Command {
    let mut idle = Command::new("chrt");
    idle.args(["--idle", "0"]).arg(build.get_program()).args(build.get_args());
    for (name, value) in build.get_envs() {
        match value {
            Some(value) => idle.env(name, value),
            None => idle.env_remove(name),
        };
    }
    if let Some(folder) = build.get_current_dir() {
        idle.current_dir(folder);
    }
    // One compiler at a time leaves memory to the machines of tests.
    idle.env("CARGO_BUILD_JOBS", "1").process_group(0);
    idle.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    idle
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::time::{Duration, Instant};

    use super::*;

    fn shell(name: &'static str, script: &str, folder: &Path) -> Build {
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir(folder);
        (name, command)
    }

    fn wait_for(what: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !what() {
            assert!(Instant::now() < deadline, "the state did not come");
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn builds_run_in_order_and_in_idle_time_and_those_that_succeed_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let policy = "chrt -p $$ | grep -q SCHED_IDLE && touch first";
        let builds = vec![
            shell("first", policy, path),
            shell("fails", "exit 1", path),
            shell("second", "test -e first && test $CARGO_BUILD_JOBS = 1 && touch second", path),
            shell("third", "touch third", path),
        ];
        let ahead = Ahead::start(builds);
        wait_for(|| lock(&ahead.state).made.len() == 3);
        assert_eq!(ahead.end(), ["first", "second", "third"]);
        assert!(path.join("third").exists());
    }

    #[test]
    fn end_kills_the_running_build_with_its_children_and_starts_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let endless = "sh -c 'touch started; sleep 1000' & wait";
        let ahead = Ahead::start(vec![shell("endless", endless, path), shell("next", "touch next", path)]);
        wait_for(|| path.join("started").exists());
        let group = lock(&ahead.state).group.unwrap();
        assert_eq!(ahead.end(), [""; 0]);
        assert!(!path.join("next").exists());
        wait_for(|| rustix::process::test_kill_process_group(group).is_err());
    }

    #[test]
    fn build_is_stopped_while_it_is_paused_and_goes_on_afterwards() {
        let folder = tempfile::tempdir().unwrap();
        let counter = folder.path().join("counter");
        let count = || fs::metadata(&counter).map_or(0, |file| file.len());
        let counting = "while :; do printf . >> counter; done";
        let ahead = Ahead::start(vec![shell("counts", counting, folder.path())]);
        wait_for(|| count() > 0);
        ahead.paused(|| {
            let group = lock(&ahead.state).group.unwrap();
            let stat = || fs::read_to_string(format!("/proc/{}/stat", group.as_raw_nonzero())).unwrap();
            wait_for(|| stat().rsplit_once(") ").unwrap().1.starts_with('T'));
        });
        let after = count();
        wait_for(|| count() > after);
        drop(ahead);
    }
}
