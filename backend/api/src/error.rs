//! Why a request is not carried out.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Why a request was not carried out. Codes are stable; what they stand for does not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// The request is not what the API describes.
    InvalidRequest,
    /// The request contradicts itself, or names an object that does not exist.
    Contradiction,
    /// The body did not come in time.
    RequestTimeout,
    /// The body is longer than 64 KiB.
    BodyTooLarge,
    /// The body is not `application/json`.
    UnsupportedMediaType,
    /// The caller has no role that allows it.
    Forbidden,
    /// There is no such thing.
    NotFound,
    /// The thing cannot be asked this.
    MethodNotAllowed,
    /// A field that cannot change was given another value.
    ImmutableField,
    /// It is of the configuration file, and is changed there.
    Configured,
    /// Something else depends on it, or has its number.
    InUse,
    /// It is not fenced, drained or quarantined.
    NotFenced,
    /// It is on its way out.
    FenceUnderway,
    /// Something of it is left that is not clean.
    Unclean,
    /// An organisation, a project or the host has not as much.
    QuotaExceeded,
    /// There is no unit of the wanted kind.
    PlacementUnavailable,
    /// Its device cannot be started.
    DeviceFailed,
    /// The change cannot be written down, and was not made.
    StorageFailed,
    /// The caller asks for more changes than one user may make in that time.
    TooManyRequests,
    /// Sluice is starting, ending or too busy; the same request may succeed later.
    Unavailable,
    /// A fault of Sluice's own.
    Internal,
}

impl fmt::Display for Code {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(formatter)
    }
}

/// An error: a stable code, a message a person can act on, and what caused it, the nearest cause first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Error {
    /// For programs.
    pub code: Code,
    /// For people.
    pub message: String,
    /// Why, step by step.
    pub cause: Vec<String>,
}

impl Error {
    /// An error without a cause.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), cause: Vec::new() }
    }

    /// With what caused it.
    #[must_use]
    pub fn because(mut self, cause: impl std::error::Error) -> Self {
        let mut next: Option<&dyn std::error::Error> = Some(&cause);
        while let Some(cause) = next {
            self.cause.push(cause.to_string());
            next = cause.source();
        }
        self
    }

    /// The request is not what the API describes.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidRequest, message)
    }

    /// The request contradicts itself, or names an object that does not exist.
    pub fn contradiction(message: impl Into<String>) -> Self {
        Self::new(Code::Contradiction, message)
    }

    /// There is no `what` called `id`.
    #[must_use]
    pub fn not_found(what: &str, id: &str) -> Self {
        Self::new(Code::NotFound, format!("there is no {what} {id}"))
    }

    /// The caller has no role that allows it.
    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(Code::Forbidden, message)
    }

    /// A change was not made because it could not be written down.
    #[must_use]
    pub fn storage(error: std::io::Error) -> Self {
        Self::new(
            Code::StorageFailed,
            "the change cannot be written down and was not made; look at the disk of the state directory",
        )
        .because(error)
    }
}
