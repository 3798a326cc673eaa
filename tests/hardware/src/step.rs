//! One step: a question, asked in a process of its own.
//!
//! A step writes its answer in notes, one JSON line each, as soon as they are known, and an end. So the notes of a step that is
//! killed are not lost.

use std::io::Write as _;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::{Value, json};

use crate::child::confine;
use crate::driver::Cuda;
use crate::libraries::Libraries;
use crate::stop::{Answer, Stop};
use crate::worker::{Peer, Worker};

/// Variable with the path of a step's folder for temporary files. It is not `TMPDIR`: a step may start processes of users who
/// cannot reach the folder.
pub(crate) const TEMPORARY: &str = "SLUICE_HARDWARE_TEMPORARY";

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

/// The process of a step.
#[derive(Debug)]
pub(crate) struct Step {
    name: &'static str,
    libraries: Libraries,
    is_short: bool,
}

impl Step {
    /// Name of the step.
    pub(crate) const fn name(&self) -> &'static str {
        self.name
    }

    /// Number of rounds of a measurement, in a full run and in a short one.
    pub(crate) const fn rounds(&self, full: u32, short: u32) -> u32 {
        if self.is_short { short } else { full }
    }

    /// True for a run of fewer steps and rounds.
    pub(crate) const fn is_short(&self) -> bool {
        self.is_short
    }

    /// The folder for temporary files, which the runner removes.
    pub(crate) fn temporary(&self) -> Answer<PathBuf> {
        let folder = std::env::var_os(TEMPORARY).map(PathBuf::from);
        folder.ok_or_else(|| Stop::failed(format!("{TEMPORARY} is not set: start the step by `run`")))
    }

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
pub(crate) fn run(question: &Question, libraries: Libraries, is_short: bool) -> Result<()> {
    confine().context("the limits of a child")?;
    let end = match (question.ask)(&Step { name: question.name, libraries, is_short }) {
        Ok(()) => json!({ "end": "answered" }),
        Err(stop) => serde_json::to_value(stop)?,
    };
    line(&end).context("the end of the step")
}

fn line(value: &Value) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{value}")?;
    out.flush()
}
