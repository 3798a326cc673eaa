//! One step: a question, asked in a process of its own.
//!
//! A step writes its answer in notes, one JSON line each, as soon as they are known, and an end. So the notes of a step that is
//! killed are not lost.

use std::io::Write as _;

use anyhow::{Context as _, Result};
use rustix::process::{Resource, Rlimit, Signal, set_parent_process_death_signal, setrlimit};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::driver::Cuda;
use crate::libraries::Libraries;
use crate::phases;
use crate::worker::{Peer, Worker};

/// A question to the hardware.
#[derive(Debug)]
pub(crate) struct Question {
    /// Name of the step.
    pub(crate) name: &'static str,
    /// The question in words.
    pub(crate) question: &'static str,
    /// The answer on which the design relies or counts.
    pub(crate) expected: &'static str,
    /// The consequence for Sluice, above all if the answer is another one.
    pub(crate) consequence: &'static str,
    /// Limit of the step in seconds.
    pub(crate) seconds: u32,
    /// Asks.
    pub(crate) ask: fn(&Step) -> Answer,
}

/// The end of a step; the answer itself is in its notes.
pub(crate) type Answer<T = ()> = core::result::Result<T, Stop>;

/// The reason why a question has no answer.
#[derive(Clone, Debug, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "end", rename_all = "kebab-case")]
pub(crate) enum Stop {
    /// The driver refused a call, or does not have it.
    #[error("refused: {reason}")]
    Refused {
        /// The call and the refusal.
        reason: String,
        /// Name of the driver's result.
        code: Option<String>,
    },
    /// The question has no meaning on this machine.
    #[error("not asked: {reason}")]
    NotAsked {
        /// The missing condition.
        reason: String,
    },
    /// The step itself failed.
    #[error("failed: {reason}")]
    Failed {
        /// The error.
        reason: String,
    },
}

impl Stop {
    /// A call that the library does not have.
    pub(crate) fn absent(symbol: &str) -> Stop {
        Stop::Refused { reason: format!("symbol {symbol} is absent"), code: None }
    }

    /// A call that the driver refused.
    pub(crate) fn refused(call: &str, code: u32) -> Stop {
        let name = crate::driver::name(code);
        Stop::Refused { reason: format!("{call} returned {name}"), code: Some(name) }
    }

    /// A machine without a condition of the question.
    pub(crate) fn not_asked(reason: impl Into<String>) -> Stop {
        Stop::NotAsked { reason: reason.into() }
    }

    /// An error of the step.
    pub(crate) fn failed(reason: impl Into<String>) -> Stop {
        Stop::Failed { reason: reason.into() }
    }
}

impl From<std::io::Error> for Stop {
    fn from(error: std::io::Error) -> Stop {
        Stop::failed(format!("system: {error}"))
    }
}

impl From<rustix::io::Errno> for Stop {
    fn from(error: rustix::io::Errno) -> Stop {
        Stop::failed(format!("system: {error}"))
    }
}

impl From<serde_json::Error> for Stop {
    fn from(error: serde_json::Error) -> Stop {
        Stop::failed(format!("message: {error}"))
    }
}

/// The process of a step.
#[derive(Debug)]
pub(crate) struct Step {
    libraries: Libraries,
}

impl Step {
    /// Writes a part of the answer down.
    pub(crate) fn note(&self, key: &str, value: impl Serialize) -> Answer {
        line(&json!({ "note": key, "value": serde_json::to_value(value)? }))?;
        Ok(())
    }

    /// Notes the value or the refusal of one part of the question, and goes on with the others.
    pub(crate) fn note_result<T: Serialize>(&self, key: &str, result: Answer<T>) -> Answer {
        match result {
            Ok(value) => self.note(key, value),
            Err(Stop::Refused { reason, code }) => self.note(key, json!({ "refused": reason, "code": code })),
            Err(other) => Err(other),
        }
    }

    /// Loads the driver, without a call to it.
    pub(crate) fn cuda(&self) -> Answer<Cuda> {
        Cuda::open(&self.libraries.driver)
    }

    /// Starts the driver with a context in this process.
    pub(crate) fn worker(&self) -> Answer<Worker> {
        Worker::start(self.cuda()?)
    }

    /// Starts another process that has the driver loaded and serves commands.
    pub(crate) fn peer(&self) -> Answer<Peer> {
        Peer::start(&self.libraries, None)
    }

    /// As [`Step::peer`], as another user.
    pub(crate) fn peer_of(&self, user: u32) -> Answer<Peer> {
        Peer::start(&self.libraries, Some(user))
    }

    /// The libraries.
    pub(crate) fn libraries(&self) -> &Libraries {
        &self.libraries
    }
}

/// Runs a step in this process.
pub(crate) fn run(name: &str, libraries: Libraries) -> Result<()> {
    confine().context("the limits of a child")?;
    let question = phases::find(name).with_context(|| format!("no step is named {name}"))?;
    let end = match (question.ask)(&Step { libraries }) {
        Ok(()) => json!({ "end": "answered" }),
        Err(stop) => serde_json::to_value(stop)?,
    };
    line(&end).context("the end of the step")
}

/// Makes a child end with its parent and leave no core file.
pub(crate) fn confine() -> Result<(), rustix::io::Errno> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })
}

fn line(value: &Value) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{value}")?;
    out.flush()
}
