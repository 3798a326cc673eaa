//! The management API: REST and JSON on Unix sockets, for control planes and the command line.
//!
//! Clients call it through its sockets, which the daemon opens. It owns the routes and the connections. It must never change a VM or
//! a unit itself.
//!
//! [`v1`] defines the API; its description (OpenAPI) is generated from there and promises nothing else. [`crate::caller`] identifies
//! clients, [`serve`] limits them. Handlers decide nothing: a handler parses a request and calls the [`crate::registry`] across
//! [`mailbox`].

pub mod error;
pub(crate) mod extract;
mod long_body;
pub(crate) mod mailbox;
mod metrics;
pub(crate) mod places;
pub(crate) mod serve;
pub mod v1;

use std::{
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Router,
    extract::{DefaultBodyLimit, Request, State},
    http::{HeaderValue, Method, header},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse as _, Response},
};
use sluice_api::{Code, Error};
use tokio::time::timeout;
use utoipa::{
    OpenApi as _,
    openapi::{Object, RefOr, Schema},
};
use utoipa_axum::{router::OpenApiRouter, routes};

use self::{
    error::RequestRefusal,
    mailbox::Mailbox,
    places::{RequestPlaces, User},
};

use crate::{caller::Caller, records::audit_log::RefusalRate, records::journal::Journal, registry::Registry};

/// Limit of a body, in bytes.
const BODY_BYTES: usize = 64 << 10;
/// Limit of a method and path in the audit log, in characters.
const ASKED: usize = 200;
/// Time limit for an answer.
const ANSWER: Duration = Duration::from_secs(60);

/// State of the handlers.
#[derive(Clone, Debug)]
pub(crate) struct Api {
    pub(crate) mailbox: Mailbox,
    pub(crate) journal: Arc<Journal>,
    /// Limit of clients that follow events.
    pub(crate) followers: Arc<RequestPlaces>,
    /// Rate limit of refusals in the audit log.
    pub(crate) refusals: Arc<RefusalRate>,
}

#[derive(utoipa::OpenApi)]
#[openapi(
    info(
        title = "Sluice",
        description = "The management API of sluiced, on a Unix socket. Requests and answers are JSON. PUT creates an object \
                       or changes it to match the request. DELETE of a missing object succeeds. Both can be repeated. The \
                       kernel identifies the caller (SO_PEERCRED), and the configuration gives the caller a role.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    components(schemas(Error))
)]
struct Description;

fn parts() -> (Router<Api>, utoipa::openapi::OpenApi) {
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(v1::health::healthz))
        .routes(routes!(v1::health::readyz))
        .routes(routes!(v1::health::metrics))
        .routes(routes!(v1::host::host))
        .routes(routes!(v1::vms::list))
        .routes(routes!(v1::vms::get, v1::vms::put, v1::vms::delete))
        .routes(routes!(v1::vms::fence))
        .routes(routes!(v1::vms::readmit))
        .routes(routes!(v1::vms::drain))
        .routes(routes!(v1::vms::relocate))
        .routes(routes!(v1::units::gpus))
        .routes(routes!(v1::units::gpu))
        .routes(routes!(v1::units::drain_gpu))
        .routes(routes!(v1::units::readmit_gpu))
        .routes(routes!(v1::units::switch_mig))
        .routes(routes!(v1::capacity::capacity))
        .routes(routes!(v1::capacity::would_fit))
        .routes(routes!(v1::suggestions::suggestions))
        .routes(routes!(v1::units::list))
        .routes(routes!(v1::units::get))
        .routes(routes!(v1::units::drain))
        .routes(routes!(v1::units::readmit))
        .routes(routes!(v1::tree::list_organisations))
        .routes(routes!(
            v1::tree::get_organisation,
            v1::tree::put_organisation,
            v1::tree::delete_organisation
        ))
        .routes(routes!(v1::tree::list_projects))
        .routes(routes!(v1::tree::get_project, v1::tree::put_project, v1::tree::delete_project))
        .routes(routes!(v1::sizes::list))
        .routes(routes!(v1::sizes::get, v1::sizes::put, v1::sizes::delete))
        .routes(routes!(v1::usage::usage))
        .routes(routes!(v1::events::events))
        .split_for_parts()
}

/// Makes one schema of a structure and of those flattened into it: readers of JSON see one object.
fn join(schema: &mut RefOr<Schema>) {
    let RefOr::T(Schema::AllOf(all)) = schema else { return };
    let mut whole = Object::default();
    whole.description = all.description.take();
    // The fields of the structure itself come last.
    for mut item in all.items.drain(..).rev() {
        join(&mut item);
        let RefOr::T(Schema::Object(part)) = item else { continue };
        whole.properties.extend(part.properties);
        whole.required.extend(part.required);
        whole.additional_properties = whole.additional_properties.or(part.additional_properties);
    }
    *schema = whole.into();
}

/// The description of the API.
///
/// # Errors
/// The description cannot be written as JSON.
pub fn openapi() -> serde_json::Result<String> {
    let mut api = parts().1;
    api.components.iter_mut().flat_map(|components| components.schemas.values_mut()).for_each(join);
    let mut text = api.to_pretty_json()?;
    text.push('\n');
    Ok(text)
}

/// The router of the API.
pub(crate) fn router(api: Api) -> Router {
    parts()
        .0
        .fallback(|| async { RequestRefusal(Error::new(Code::NotFound, "the path is not one of the API")) })
        .method_not_allowed_fallback(|| async {
            RequestRefusal(Error::new(Code::MethodNotAllowed, "the path does not support that method"))
        })
        .layer(DefaultBodyLimit::max(BODY_BYTES))
        .layer(from_fn_with_state(api.clone(), guard))
        .with_state(api)
}

/// Checks that apply to every request.
async fn guard(State(api): State<Api>, request: Request, next: Next) -> Response {
    let caller = request.extensions().get::<Caller>().cloned();
    // The client chooses the length of a path.
    let asked: String =
        format!("{} {}", request.method(), request.uri().path()).chars().take(ASKED).collect();
    let response = bounded(&api.journal, request, next).await;
    if let Some(caller) = caller
        && let Some(refusal) =
            response.extensions().get::<RequestRefusal>().filter(|refusal| refusal.is_audited())
        && let Some(left_out) = api.refusals.take(caller.uid, Instant::now())
    {
        let mut why = refusal.0.message.clone();
        if left_out > 0 {
            why.push_str(&format!(" ({left_out} refusals before it were not recorded)"));
        }
        let note = move |registry: Rc<Registry>| async move {
            registry.audit_log.entry(&caller, "refused", asked).note_failure(&why).await;
            Ok(())
        };
        if let Err(error) = api.mailbox.call(note).await {
            tracing::error!(error = error.0.message, "cannot record a refusal in the audit log");
        }
    }
    response
}

async fn bounded(journal: &Journal, request: Request, next: Next) -> Response {
    let changes = !matches!(*request.method(), Method::GET | Method::HEAD);
    let reading = request.extensions().get::<Caller>().is_none_or(|caller| caller.reading);
    if changes && reading {
        return RequestRefusal(Error::forbidden("this socket is read-only")).into_response();
    }
    let user = request.extensions().get::<Arc<User>>().cloned();
    if changes && let Some(Err(wait)) = user.as_ref().map(|user| user.change()) {
        let message = format!("too many changes of one user; try again in {} s", wait.as_secs() + 1);
        return RequestRefusal(Error::new(Code::TooManyRequests, message)).into_response();
    }
    let path = request.uri().path().to_owned();
    let answer = next.run(request);
    let answer = async {
        let answer = answer.await;
        if changes {
            // Events of acknowledged changes survive this daemon.
            journal.settled().await;
        }
        answer
    };
    let answer = async {
        match user {
            Some(user) => user.serve(answer).await,
            None => answer.await,
        }
    };
    match timeout(ANSWER, answer).await {
        Ok(mut response) => {
            // No proxy may cache a state that changes at any moment.
            response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
            response
        }
        Err(_) => {
            tracing::warn!(path, limit = ?ANSWER, "a request has no answer in time");
            let message = format!("no answer in {ANSWER:?}; the request continues");
            RequestRefusal(Error::new(Code::Unavailable, message)).into_response()
        }
    }
}
