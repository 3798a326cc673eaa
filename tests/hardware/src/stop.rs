//! The ends of questions: an answer, or the reason why there is none.

use serde::{Deserialize, Serialize};
use sluice_cuda_abi::status;

/// The end of a step; the answer itself is in its notes.
pub(crate) type Answer<T = ()> = Result<T, Stop>;

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
        let name = name(code);
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

/// Name of a result of the driver, or its number.
pub(crate) fn name(code: u32) -> String {
    status::name(code).map_or_else(|| format!("CUresult {code}"), |name| name.to_string_lossy().into_owned())
}
