//! Errors of the API: reasons why a request is not carried out.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Reason why a request failed. Codes are stable, and so is their meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// The request does not match the API's description.
    InvalidRequest,
    /// The request contradicts itself, or names an object that does not exist.
    Contradiction,
    /// The body did not arrive in time.
    RequestTimeout,
    /// The body is longer than 64 KiB.
    BodyTooLarge,
    /// The body is not `application/json`.
    UnsupportedMediaType,
    /// The caller has no role that allows the request.
    Forbidden,
    /// The object does not exist.
    NotFound,
    /// The path does not support this method.
    MethodNotAllowed,
    /// The request changes a field that cannot be changed.
    ImmutableField,
    /// Another object depends on this one, or has its number.
    InUse,
    /// The object is not fenced, drained or quarantined.
    NotFenced,
    /// A fence of the VM is under way.
    FenceUnderway,
    /// Some memory of the VM is not clean.
    Unclean,
    /// A limit of an organisation, a project or the host is exceeded.
    QuotaExceeded,
    /// No unit of the requested kind is available.
    PlacementUnavailable,
    /// The VM's device cannot be started.
    DeviceFailed,
    /// The change cannot be written to disk and was not made.
    StorageFailed,
    /// The user exceeds the rate limit for changes.
    TooManyRequests,
    /// Sluice is starting, stopping or too busy. The same request may succeed later.
    Unavailable,
    /// An internal error of Sluice.
    Internal,
}

impl fmt::Display for Code {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(formatter)
    }
}

/// An error: a stable code, a message to act on, and its causes, the nearest cause first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Error {
    /// Code for programs.
    pub code: Code,
    /// Message for people.
    pub message: String,
    /// Chain of causes.
    pub cause: Vec<String>,
}

impl Error {
    /// An error without a cause.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), cause: Vec::new() }
    }

    /// Adds a cause with its own causes.
    #[must_use]
    pub fn because(mut self, cause: impl std::error::Error) -> Self {
        let mut next: Option<&dyn std::error::Error> = Some(&cause);
        while let Some(cause) = next {
            self.cause.push(cause.to_string());
            next = cause.source();
        }
        self
    }

    /// The request does not match the API's description.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidRequest, message)
    }

    /// The request contradicts itself, or names an object that does not exist.
    pub fn contradiction(message: impl Into<String>) -> Self {
        Self::new(Code::Contradiction, message)
    }

    /// No `what` has the name `id`.
    #[must_use]
    pub fn not_found(what: &str, id: &str) -> Self {
        Self::new(Code::NotFound, format!("there is no {what} {id}"))
    }

    /// The caller has no role that allows the request.
    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(Code::Forbidden, message)
    }

    /// The change was not made because it cannot be written to disk.
    #[must_use]
    pub fn storage(error: std::io::Error) -> Self {
        Self::new(
            Code::StorageFailed,
            "the change cannot be written down and was not made; look at the disk of the state directory",
        )
        .because(error)
    }
}
