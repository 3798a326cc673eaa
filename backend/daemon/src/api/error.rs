//! Errors as responses: their status, and the descriptions of them in the API.

use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use sluice_api::{Code, Error};
use utoipa::IntoResponses;

/// A refused request: the response, and the error for the audit log.
#[derive(Clone, Debug)]
pub(crate) struct RequestRefusal(pub(crate) Error);

impl RequestRefusal {
    /// True if a role or a limit is the reason, and not the request's form or the state.
    pub(crate) fn is_audited(&self) -> bool {
        matches!(self.0.code, Code::Forbidden | Code::QuotaExceeded)
    }
}

impl From<Error> for RequestRefusal {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl IntoResponse for RequestRefusal {
    fn into_response(self) -> Response {
        let mut response = (status(self.0.code), Json(&self.0)).into_response();
        response.extensions_mut().insert(self);
        response
    }
}

/// Responses to a failed request.
#[derive(Debug, IntoResponses)]
pub enum Errors {
    /// The request does not match the API's description.
    #[response(status = 400)]
    Invalid(Error),
    /// The caller has no role that allows the request.
    #[response(status = 403)]
    Forbidden(Error),
    /// The object does not exist.
    #[response(status = 404)]
    NotFound(Error),
    /// Sluice is starting, stopping or too busy, or a process cannot be started.
    #[response(status = 503)]
    Unavailable(Error),
}

/// Responses to a failed change.
#[derive(Debug, IntoResponses)]
pub enum ChangeErrors {
    /// The request does not match the API's description.
    #[response(status = 400)]
    Invalid(Error),
    /// The caller has no role that allows the request.
    #[response(status = 403)]
    Forbidden(Error),
    /// The object does not exist.
    #[response(status = 404)]
    NotFound(Error),
    /// The body did not arrive in time.
    #[response(status = 408)]
    Timeout(Error),
    /// The current state does not allow the change. The code names the reason.
    #[response(status = 409)]
    Conflict(Error),
    /// The body is longer than 64 KiB.
    #[response(status = 413)]
    TooLarge(Error),
    /// The body is not `application/json`.
    #[response(status = 415)]
    MediaType(Error),
    /// The user exceeds the rate limit for changes.
    #[response(status = 429)]
    TooMany(Error),
    /// Sluice is starting, stopping or too busy, or a process cannot be started.
    #[response(status = 503)]
    Unavailable(Error),
    /// The change cannot be written to disk and was not made.
    #[response(status = 507)]
    Storage(Error),
}

pub(crate) const fn status(code: Code) -> StatusCode {
    match code {
        Code::InvalidRequest => StatusCode::BAD_REQUEST,
        Code::RequestTimeout => StatusCode::REQUEST_TIMEOUT,
        Code::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        Code::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        Code::Forbidden => StatusCode::FORBIDDEN,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
        Code::Contradiction
        | Code::ImmutableField
        | Code::InUse
        | Code::NotFenced
        | Code::FenceUnderway
        | Code::Unclean
        | Code::QuotaExceeded
        | Code::PlacementUnavailable => StatusCode::CONFLICT,
        Code::TooManyRequests => StatusCode::TOO_MANY_REQUESTS,
        Code::DeviceFailed | Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::StorageFailed => StatusCode::INSUFFICIENT_STORAGE,
        Code::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
