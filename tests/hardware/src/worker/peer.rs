//! A worker in another process, and the commands to it.

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command as Process, Stdio};

use anyhow::{Context as _, Result};
use rustix::process::{DumpableBehavior, Gid, Uid, set_dumpable_behavior};
use serde_json::{Value, json};
use sluice_shared_memory::socket;

use super::{Command, Worker};
use crate::child::confine;
use crate::driver::Cuda;
use crate::libraries::Libraries;
use crate::link::Link;
use crate::stop::{Answer, Stop};

/// A worker in a process of its own. Dropping it ends the process.
#[derive(Debug)]
pub(crate) struct Peer {
    link: Link,
    process: u32,
    /// `None` if another waits for the process.
    child: Option<Child>,
}

impl Peer {
    /// Starts the process; it has the driver loaded when it answers [`Command::Start`].
    pub(crate) fn start(libraries: &Libraries, user: Option<u32>) -> Answer<Peer> {
        let mut command = Process::new("/proc/self/exe");
        command.arg0("sluice-hardware").arg("worker").args(libraries.arguments());
        if let Some(user) = user {
            command.args(["--user", &user.to_string()]);
        }
        Peer::spawn(&mut command)
    }

    /// Starts a worker by a prepared command.
    pub(crate) fn spawn(command: &mut Process) -> Answer<Peer> {
        let (ours, theirs) = socket::pair()?;
        let child = command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).spawn()?;
        Ok(Peer { link: Link::new(ours), process: child.id(), child: Some(child) })
    }

    /// Its process.
    pub(crate) fn process(&self) -> u32 {
        self.process
    }

    /// Sends a command without waiting for its answer.
    pub(crate) fn tell(&self, command: Command) -> Answer {
        self.link.send(&command, None)
    }

    /// Waits for an answer.
    pub(crate) fn answer(&self) -> Answer<(Value, Option<OwnedFd>)> {
        let received: Option<(Result<Value, Stop>, _)> = self.link.receive()?;
        let (answer, descriptor) = received.ok_or_else(|| Stop::failed("the other process ended"))?;
        Ok((answer?, descriptor))
    }

    /// Makes it obey a command.
    pub(crate) fn ask(&self, command: Command) -> Answer<Value> {
        self.tell(command)?;
        Ok(self.answer()?.0)
    }

    /// As [`Peer::ask`], for an answer that is a number.
    pub(crate) fn number(&self, command: Command) -> Answer<u64> {
        self.ask(command)?.as_u64().ok_or_else(|| Stop::failed("the answer is no number"))
    }

    /// Makes it import a chunk.
    pub(crate) fn import(&self, descriptor: &OwnedFd, bytes: u64) -> Answer<Value> {
        self.link.send(&Command::Import { bytes }, Some(descriptor.as_fd()))?;
        Ok(self.answer()?.0)
    }

    /// Makes it export its chunk.
    pub(crate) fn export(&self) -> Answer<OwnedFd> {
        self.tell(Command::Export)?;
        self.answer()?.1.ok_or_else(|| Stop::failed("an export without a descriptor"))
    }

    /// Ends the process and waits until it is reaped.
    pub(crate) fn end(mut self) -> Answer {
        if let Some(mut child) = self.child.take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// Leaves the process to a tracer, which waits for it.
    pub(crate) fn disown(&mut self) {
        self.child = None;
    }

    /// Closes the socket, on which the process ends by itself.
    pub(crate) fn hang_up(&self) -> Answer {
        self.link.close()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The runner kills the group in any case; here the process only ends sooner.
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Serves commands on standard input until it is closed.
pub(crate) fn serve(user: Option<u32>, libraries: Libraries) -> Result<()> {
    if let Some(user) = user {
        become_user(user).context("another user")?;
    }
    confine().context("the limits of a child")?;
    let link = Link::new(std::io::stdin().as_fd().try_clone_to_owned().context("the socket")?);
    let mut state = State::Nothing;
    while let Some((command, descriptor)) = link.receive::<Command>()? {
        let answer = state.obey(&libraries, command, descriptor);
        match answer {
            Ok((value, descriptor)) => {
                let answer: Answer<Value> = Ok(value);
                link.send(&answer, descriptor.as_ref().map(|descriptor| descriptor.as_fd()))?;
            }
            Err(stop) => {
                let answer: Answer<Value> = Err(stop);
                link.send(&answer, None)?;
            }
        }
    }
    Ok(())
}

/// The driver in a process that obeys.
enum State {
    Nothing,
    Open(Cuda),
    Running(Worker),
}

impl State {
    fn obey(
        &mut self,
        libraries: &Libraries,
        command: Command,
        descriptor: Option<OwnedFd>,
    ) -> Answer<(Value, Option<OwnedFd>)> {
        *self = match (core::mem::replace(self, State::Nothing), command) {
            (State::Nothing, Command::Open) => State::Open(Cuda::open(&libraries.driver)?),
            (State::Open(cuda), Command::Init) => {
                cuda.ask("cuInit", |driver| driver.init())?;
                State::Open(cuda)
            }
            (State::Nothing, _) => State::Running(Worker::start(Cuda::open(&libraries.driver)?)?),
            (State::Open(cuda), _) => State::Running(Worker::start(cuda)?),
            (running, _) => running,
        };
        match self {
            State::Running(worker) => worker.obey(command, descriptor),
            State::Nothing | State::Open(_) => Ok((json!(true), None)),
        }
    }
}

/// Gives up root for good, as a worker's start does.
fn become_user(user: u32) -> Result<(), rustix::io::Errno> {
    let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    // A change of the user makes the files of this process in /proc those of root; a start by `execve` would undo that.
    set_dumpable_behavior(DumpableBehavior::Dumpable)
}
