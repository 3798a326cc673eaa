//! What handlers take from a request, with errors in the API's own form.

use std::time::Duration;

use axum::{
    Json,
    extract::{
        FromRequest, FromRequestParts, Path, Query, Request,
        rejection::{JsonRejection, PathRejection, QueryRejection},
    },
    http::{StatusCode, request::Parts},
};
use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use serde_json::Value;
use tokio::time::timeout;

use crate::{
    caller::{Caller, no_role},
    error::{Code, Error},
};

/// How long a client may take to send a body.
const BODY: Duration = Duration::from_secs(10);
/// Bytes of a name.
const NAME: usize = 64;

/// A name that a client chose: letters, digits, `.`, `_` and `-`, the first a letter or a digit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Id(pub(crate) String);

impl Id {
    /// What is a name, and no path, option or markup.
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

/// The one variable part of a path, not checked yet.
async fn name_in_path<S: Send + Sync>(parts: &mut Parts, state: &S) -> Result<String, Error> {
    let Path(name) = Path::from_request_parts(parts, state)
        .await
        .map_err(|error: PathRejection| Error::invalid("the path is not one of the API").because(error))?;
    Ok(name)
}

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        let name = name_in_path(parts, state).await?;
        Self::check(&name)?;
        Ok(Self(name))
    }
}

/// The name of a VM in a path: as its client named it, or as its host names it, `organisation/name` (with `%2F`).
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
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        let name = name_in_path(parts, state).await?;
        Self::check(&name)?;
        Ok(Self(name))
    }
}

/// A number in the path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Number(pub(crate) u32);

impl<S: Send + Sync> FromRequestParts<S> for Number {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        let Path(text): Path<String> =
            Path::from_request_parts(parts, state).await.map_err(|error: PathRejection| {
                Error::invalid("the path is not one of the API").because(error)
            })?;
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        let number = text.parse().ok().filter(|_| digits);
        number.map(Self).ok_or_else(|| Error::invalid(format!("{text:?} is not a number")))
    }
}

/// What follows the `?`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Asked<T> {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        let Query(query) =
            Query::from_request_parts(parts, state).await.map_err(|error: QueryRejection| {
                Error::invalid("what follows the ? is not understood").because(error)
            })?;
        Ok(Self(query))
    }
}

/// A body of JSON.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Body<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Error;

    async fn from_request(request: Request, state: &S) -> Result<Self, Error> {
        let read = timeout(BODY, Json::from_request(request, state)).await;
        let read =
            read.map_err(|_| Error::new(Code::RequestTimeout, format!("the body has not come in {BODY:?}")))?;
        let Json(Object(body)) = read.map_err(refuse)?;
        Ok(Self(body))
    }
}

/// What is an object: by itself, a structure would be taken from a list of its values, too.
struct Object<T>(T);

impl<'de, T: DeserializeOwned> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        object(deserializer).map(Self)
    }
}

/// A structure within one.
pub(crate) fn object<'de, T: DeserializeOwned, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    let mut map = serde_json::Map::deserialize(deserializer)?;
    map.values_mut().for_each(whole);
    serde_json::from_value(map.into()).map_err(serde::de::Error::custom)
}

/// In JSON `5.0` is the integer 5; some languages write it so.
fn whole(value: &mut Value) {
    /// Beyond it not every integer is a floating-point number.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let number = value.as_f64().filter(|_| value.is_f64());
    if let Some(number) = number.filter(|number| number.fract() == 0.0 && number.abs() <= EXACT) {
        #[expect(clippy::cast_possible_truncation, reason = "an integer of 54 bits, by the line above")]
        let whole = number as i64;
        *value = whole.into();
    }
}

/// The same, where there may be none.
pub(crate) fn optional_object<'de, T: DeserializeOwned, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    Ok(Option::<Object<T>>::deserialize(deserializer)?.map(|Object(value)| value))
}

/// A list of structures.
pub(crate) fn objects_of<'de, T: DeserializeOwned, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    Ok(Vec::<Object<T>>::deserialize(deserializer)?.into_iter().map(|Object(value)| value).collect())
}

fn refuse(rejection: JsonRejection) -> Error {
    let code = match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => Code::BodyTooLarge,
        StatusCode::UNSUPPORTED_MEDIA_TYPE => Code::UnsupportedMediaType,
        _ => Code::InvalidRequest,
    };
    let message = match code {
        Code::BodyTooLarge => "the body is longer than 64 KiB",
        Code::UnsupportedMediaType => "the body is not said to be application/json",
        _ => "the body is not what the API describes",
    };
    Error::new(code, message).because(rejection)
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Error> {
        let caller = parts.extensions.get::<Self>().filter(|caller| caller.is_known()).cloned();
        caller.ok_or_else(no_role)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_integer_may_be_written_with_a_point() {
        let read = |text: &str| {
            let Object(numbers): Object<std::collections::BTreeMap<String, u64>> =
                serde_json::from_str(text)?;
            Ok::<_, serde_json::Error>(numbers["a"])
        };
        assert_eq!(read("{\"a\": 5.0}").ok(), Some(5));
        for bad in ["{\"a\": 5.5}", "{\"a\": -5.0}", "{\"a\": 1e300}", "[5]"] {
            assert!(read(bad).is_err(), "{bad} was taken");
        }
    }

    // Promise: A41
    #[test]
    fn a_vm_is_named_alone_or_with_its_organisation() {
        for good in ["a", "acme/a", "project:web/a", "7"] {
            assert!(VmName::check(good).is_ok(), "{good}");
        }
        for bad in ["", "/", "/a", "a/", "a/b/c", "../a", "a/..", "project:/a", "x:web/a", "a:b"] {
            assert!(VmName::check(bad).is_err(), "{bad:?} was taken");
        }
    }

    #[test]
    fn a_name_is_no_path() {
        for good in ["a", "7", "web-1", "0f9e.b_c", &"x".repeat(64)] {
            assert!(Id::check(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "-a", "_a", "a/b", "a b", "ä", "a\0", "a\n", &"x".repeat(65)] {
            assert!(Id::check(bad).is_err(), "{bad:?} was taken");
        }
    }
}
