//! Extractors: the parts of a request that handlers take, with errors in the API's own form.

use std::time::Duration;

use axum::{
    Json,
    extract::{
        FromRequest, FromRequestParts, Path, Query, Request,
        rejection::{JsonRejection, PathRejection, QueryRejection},
    },
    http::{StatusCode, request::Parts},
};
use serde::de::DeserializeOwned;
use sluice_api::{Code, Error, json::Object};
use tokio::time::timeout;

use super::error::RequestRefusal;
use crate::caller::{Caller, no_role};

/// Time limit for a body.
const BODY: Duration = Duration::from_secs(10);
/// Limit of a name, in bytes.
const NAME: usize = 64;

/// A name that a client chose: letters, digits, `.`, `_` and `-`, the first a letter or a digit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Id(pub(crate) String);

impl Id {
    /// Checks that a text is a name, hence no path, option or markup.
    pub(crate) fn check(name: &str) -> Result<(), Error> {
        let inner = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let begins = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
        if begins && name.len() <= NAME && name.bytes().all(inner) {
            return Ok(());
        }
        let shown: String = name.chars().take(NAME).collect();
        Err(Error::invalid(format!(
            "{shown:?} is no name: it takes 1 to {NAME} letters, digits, '.', '_' and '-', the first a letter or digit"
        )))
    }
}

/// The one variable part of a path, unchecked.
async fn name_in_path<S: Send + Sync>(parts: &mut Parts, state: &S) -> Result<String, Error> {
    let Path(name) = Path::from_request_parts(parts, state)
        .await
        .map_err(|error: PathRejection| Error::invalid("the path is not one of the API").because(error))?;
    Ok(name)
}

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = RequestRefusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, RequestRefusal> {
        let name = name_in_path(parts, state).await?;
        Self::check(&name)?;
        Ok(Self(name))
    }
}

/// The name of a VM in a path: its client's name, or the name on its host, `organisation/name` (with `%2F`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VmName(pub(crate) String);

impl VmName {
    fn check(name: &str) -> Result<(), Error> {
        let (scope, name) = name.split_once('/').map_or((None, name), |(scope, name)| (Some(scope), name));
        let scope = scope.map(|scope| scope.strip_prefix("project:").unwrap_or(scope));
        scope.map_or(Ok(()), Id::check)?;
        Id::check(name)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for VmName {
    type Rejection = RequestRefusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, RequestRefusal> {
        let name = name_in_path(parts, state).await?;
        Self::check(&name)?;
        Ok(Self(name))
    }
}

/// A number in the path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Number(pub(crate) u32);

impl<S: Send + Sync> FromRequestParts<S> for Number {
    type Rejection = RequestRefusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, RequestRefusal> {
        let Path(text): Path<String> =
            Path::from_request_parts(parts, state).await.map_err(|error: PathRejection| {
                Error::invalid("the path is not one of the API").because(error)
            })?;
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        let number = text.parse().ok().filter(|_| digits);
        Ok(Self(number.ok_or_else(|| Error::invalid(format!("{text:?} is not a number")))?))
    }
}

/// The query of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestQuery<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for RequestQuery<T> {
    type Rejection = RequestRefusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, RequestRefusal> {
        let Query(query) =
            Query::from_request_parts(parts, state).await.map_err(|error: QueryRejection| {
                Error::invalid("the query is not one of the API").because(error)
            })?;
        Ok(Self(query))
    }
}

/// A body of JSON.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Body<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = RequestRefusal;

    async fn from_request(request: Request, state: &S) -> Result<Self, RequestRefusal> {
        let read = timeout(BODY, Json::from_request(request, state)).await;
        let read = read
            .map_err(|_| Error::new(Code::RequestTimeout, format!("the body did not arrive in {BODY:?}")))?;
        let Json(Object(body)) = read.map_err(refuse)?;
        Ok(Self(body))
    }
}

fn refuse(rejection: JsonRejection) -> Error {
    let code = match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => Code::BodyTooLarge,
        StatusCode::UNSUPPORTED_MEDIA_TYPE => Code::UnsupportedMediaType,
        _ => Code::InvalidRequest,
    };
    let message = match code {
        Code::BodyTooLarge => "the body is longer than 64 KiB",
        Code::UnsupportedMediaType => "the content type of the body is not application/json",
        _ => "the body does not match the API's description",
    };
    Error::new(code, message).because(rejection)
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = RequestRefusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, RequestRefusal> {
        let caller = parts.extensions.get::<Self>().filter(|caller| caller.is_known()).cloned();
        Ok(caller.ok_or_else(no_role)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: A41
    #[test]
    fn vm_name_is_a_name_alone_or_with_an_organisation() {
        for good in ["a", "acme/a", "project:web/a", "7"] {
            assert!(VmName::check(good).is_ok(), "{good}");
        }
        for bad in ["", "/", "/a", "a/", "a/b/c", "../a", "a/..", "project:/a", "x:web/a", "a:b"] {
            assert!(VmName::check(bad).is_err(), "{bad:?} was accepted");
        }
    }

    #[test]
    fn name_that_is_a_path_is_refused() {
        for good in ["a", "7", "web-1", "0f9e.b_c", &"x".repeat(64)] {
            assert!(Id::check(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "-a", "_a", "a/b", "a b", "ä", "a\0", "a\n", &"x".repeat(65)] {
            assert!(Id::check(bad).is_err(), "{bad:?} was accepted");
        }
    }
}
