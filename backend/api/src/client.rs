//! A client of the management API, with a function for each of its operations.
//!
//! It blocks, and each request has a connection of its own. Names in paths are escaped, so that the API refuses an invalid name
//! and does not read it as another path.

use std::{io, path::PathBuf};

use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use crate::{
    Error,
    http::{self, Answer},
    v1::{
        Capacity, Event, EventsQuery, FenceRequest, FitRequest, Gpu, Gpus, Healthy, Host, MigModeRequest,
        MoveQuery, Organisation, OrganisationRequest, Organisations, Project, ProjectRequest, Projects, Size,
        SizeRequest, Sizes, Suggestions, Unit, Units, Usage, Vm, VmRequest, Vms, WouldFit,
    },
};

/// Limit of an answer in bytes: enough for some ten thousand VMs.
const ANSWER: u64 = 64 << 20;
/// Limit of an event, in bytes.
const EVENT: u64 = 64 << 10;

/// A client of the management API at a socket.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
}

/// A request failed.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// No sluiced answers.
    #[error("no sluiced answers at {}", socket.display())]
    NoAnswer {
        /// Path of the socket.
        socket: PathBuf,
        /// Cause.
        #[source]
        error: io::Error,
    },
    /// The API refused the request.
    #[error("{}", .0.message)]
    Refused(Error),
    /// The API refused the request with a body that is not an [`Error`].
    #[error("the API answers with status {0}")]
    Status(u16),
    /// The answer is incomplete.
    #[error("{what}")]
    Broken {
        /// Description of the failure.
        what: &'static str,
        /// Cause.
        #[source]
        error: io::Error,
    },
    /// The answer does not match the API's description.
    #[error("{what} is {}", if error.is_data() { "of a form that this version does not know" } else { "not JSON" })]
    NotUnderstood {
        /// Name of the part that does not match.
        what: &'static str,
        /// Cause.
        #[source]
        error: serde_json::Error,
    },
}

/// Result of a PUT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Put<T> {
    /// State of the object after the PUT.
    pub object: T,
    /// True if the object was created.
    pub made: bool,
}

/// An event stream.
#[derive(Debug)]
pub struct EventStream(Answer);

impl Iterator for EventStream {
    type Item = Result<Event, CallError>;

    fn next(&mut self) -> Option<Self::Item> {
        let broken = |error| CallError::Broken { what: "the stream of events is cut off", error };
        let line = match self.0.line(EVENT) {
            Ok(line) => line?,
            Err(error) => return Some(Err(broken(error))),
        };
        Some(understood("an event", line.as_bytes()))
    }
}

/// Each function is an operation of the API. It fails if the API refuses the request or does not answer.
impl Client {
    /// A client for a socket. The socket need not exist yet.
    pub fn at(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into() }
    }

    /// Checks that the daemon answers.
    pub fn health(&self) -> Result<Healthy, CallError> {
        self.get("/healthz")
    }

    /// Checks that every unit lends and every VM has its device. A refusal names the causes.
    pub fn readiness(&self) -> Result<Healthy, CallError> {
        self.get("/readyz")
    }

    /// Reads metrics, in the text form of OpenMetrics.
    pub fn metrics(&self) -> Result<String, CallError> {
        let (_, text) = self.ask("GET", "/metrics", None)?;
        let broken = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        String::from_utf8(text).map_err(broken).map_err(unread)
    }

    /// Shows the daemon.
    pub fn host(&self) -> Result<Host, CallError> {
        self.get("/v1/host")
    }

    /// Lists VMs.
    pub fn vms(&self) -> Result<Vms, CallError> {
        self.get("/v1/vms")
    }

    /// Shows a VM.
    pub fn vm(&self, name: &str) -> Result<Vm, CallError> {
        self.get(&format!("/v1/vms/{}", escaped(name)))
    }

    /// Creates a VM, or changes it to match the request.
    pub fn put_vm(&self, name: &str, request: &VmRequest) -> Result<Put<Vm>, CallError> {
        self.put(&format!("/v1/vms/{}", escaped(name)), request)
    }

    /// Deletes a VM.
    pub fn delete_vm(&self, name: &str) -> Result<(), CallError> {
        self.ask("DELETE", &format!("/v1/vms/{}", escaped(name)), None).map(drop)
    }

    /// Fences a VM.
    pub fn fence_vm(&self, name: &str, request: &FenceRequest) -> Result<Vm, CallError> {
        self.post(&format!("/v1/vms/{}/fence", escaped(name)), Some(request))
    }

    /// Readmits a VM that was fenced or drained.
    pub fn readmit_vm(&self, name: &str) -> Result<Vm, CallError> {
        self.post(&format!("/v1/vms/{}/readmit", escaped(name)), None::<&()>)
    }

    /// Drains a VM: it can begin no new session.
    pub fn drain_vm(&self, name: &str) -> Result<Vm, CallError> {
        self.post(&format!("/v1/vms/{}/drain", escaped(name)), None::<&()>)
    }

    /// Moves a VM to another unit.
    pub fn move_vm(&self, name: &str, to: &MoveQuery) -> Result<Vm, CallError> {
        let path = format!("/v1/vms/{}/move", escaped(name));
        let kind = to.kind.map(|kind| ("kind", kind.to_string()));
        let gpu = to.gpu.map(|gpu| ("gpu", gpu.to_string()));
        self.post(&with_query(path, kind.into_iter().chain(gpu)), None::<&()>)
    }

    /// Lists GPUs.
    pub fn gpus(&self) -> Result<Gpus, CallError> {
        self.get("/v1/gpus")
    }

    /// Shows a GPU.
    pub fn gpu(&self, gpu: u32) -> Result<Gpu, CallError> {
        self.get(&format!("/v1/gpus/{gpu}"))
    }

    /// Drains a GPU.
    pub fn drain_gpu(&self, gpu: u32) -> Result<Gpu, CallError> {
        self.post(&format!("/v1/gpus/{gpu}/drain"), None::<&()>)
    }

    /// Readmits a drained GPU.
    pub fn readmit_gpu(&self, gpu: u32) -> Result<Gpu, CallError> {
        self.post(&format!("/v1/gpus/{gpu}/readmit"), None::<&()>)
    }

    /// Switches a GPU to MIG mode, or out of it.
    pub fn put_gpu_mig(&self, gpu: u32, request: &MigModeRequest) -> Result<Gpu, CallError> {
        self.put(&format!("/v1/gpus/{gpu}/mig"), request).map(|put| put.object)
    }

    /// Shows free room for more instances and VMs.
    pub fn capacity(&self) -> Result<Capacity, CallError> {
        self.get("/v1/capacity")
    }

    /// Checks if VMs would have a place now.
    pub fn would_fit(&self, request: &FitRequest) -> Result<WouldFit, CallError> {
        self.post("/v1/capacity/would-fit", Some(request))
    }

    /// Shows expected load and suggested moves.
    pub fn suggestions(&self) -> Result<Suggestions, CallError> {
        self.get("/v1/placement/suggestions")
    }

    /// Lists placement units.
    pub fn units(&self) -> Result<Units, CallError> {
        self.get("/v1/units")
    }

    /// Shows a placement unit.
    pub fn unit(&self, unit: u32) -> Result<Unit, CallError> {
        self.get(&format!("/v1/units/{unit}"))
    }

    /// Drains a unit.
    pub fn drain_unit(&self, unit: u32) -> Result<(), CallError> {
        self.ask("POST", &format!("/v1/units/{unit}/drain"), None).map(drop)
    }

    /// Readmits a quarantined or drained unit.
    pub fn readmit_unit(&self, unit: u32) -> Result<Unit, CallError> {
        self.post(&format!("/v1/units/{unit}/readmit"), None::<&()>)
    }

    /// Lists organisations.
    pub fn organisations(&self) -> Result<Organisations, CallError> {
        self.get("/v1/organisations")
    }

    /// Shows an organisation.
    pub fn organisation(&self, name: &str) -> Result<Organisation, CallError> {
        self.get(&format!("/v1/organisations/{}", escaped(name)))
    }

    /// Creates an organisation, or changes it to match the request.
    pub fn put_organisation(
        &self,
        name: &str,
        request: &OrganisationRequest,
    ) -> Result<Put<Organisation>, CallError> {
        self.put(&format!("/v1/organisations/{}", escaped(name)), request)
    }

    /// Deletes an organisation.
    pub fn delete_organisation(&self, name: &str) -> Result<(), CallError> {
        self.ask("DELETE", &format!("/v1/organisations/{}", escaped(name)), None).map(drop)
    }

    /// Lists projects.
    pub fn projects(&self) -> Result<Projects, CallError> {
        self.get("/v1/projects")
    }

    /// Shows a project.
    pub fn project(&self, name: &str) -> Result<Project, CallError> {
        self.get(&format!("/v1/projects/{}", escaped(name)))
    }

    /// Creates a project, or changes it to match the request.
    pub fn put_project(&self, name: &str, request: &ProjectRequest) -> Result<Put<Project>, CallError> {
        self.put(&format!("/v1/projects/{}", escaped(name)), request)
    }

    /// Deletes a project.
    pub fn delete_project(&self, name: &str) -> Result<(), CallError> {
        self.ask("DELETE", &format!("/v1/projects/{}", escaped(name)), None).map(drop)
    }

    /// Lists sizes.
    pub fn sizes(&self) -> Result<Sizes, CallError> {
        self.get("/v1/sizes")
    }

    /// Shows a size.
    pub fn size(&self, name: &str) -> Result<Size, CallError> {
        self.get(&format!("/v1/sizes/{}", escaped(name)))
    }

    /// Creates a size, or changes it to match the request.
    pub fn put_size(&self, name: &str, request: &SizeRequest) -> Result<Put<Size>, CallError> {
        self.put(&format!("/v1/sizes/{}", escaped(name)), request)
    }

    /// Deletes a size.
    pub fn delete_size(&self, name: &str) -> Result<(), CallError> {
        self.ask("DELETE", &format!("/v1/sizes/{}", escaped(name)), None).map(drop)
    }

    /// Shows usage.
    pub fn usage(&self) -> Result<Usage, CallError> {
        self.get("/v1/usage")
    }

    /// Follows events.
    pub fn events(&self, query: &EventsQuery) -> Result<EventStream, CallError> {
        let follow = query.follow.map(|follow| ("follow", follow.to_string()));
        let after = query.after.as_deref().map(|token| ("after", escaped(token)));
        let path = with_query("/v1/events".to_owned(), follow.into_iter().chain(after));
        self.open("GET", &path, None).map(EventStream)
    }

    /// Sends any request with a JSON body or none, and returns the status and the body whatever the status. An empty body becomes null.
    ///
    /// # Errors
    /// No answer, or an answer that is not HTTP.
    pub fn exchange(&self, method: &str, path: &str, body: Option<&Value>) -> io::Result<(u16, Value)> {
        let body = body.map(Value::to_string);
        let answer = http::request(&self.socket, method, path, body.as_ref().map(String::as_bytes))?;
        let status = answer.status;
        let text = answer.read(ANSWER)?;
        let plain = || String::from_utf8_lossy(&text).into_owned().into();
        let body = if text.is_empty() {
            Value::Null
        } else {
            serde_json::from_slice(&text).unwrap_or_else(|_| plain())
        };
        Ok((status, body))
    }

    fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, CallError> {
        let (_, text) = self.ask("GET", path, None)?;
        understood("the API's answer", &text)
    }

    fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        request: Option<&impl Serialize>,
    ) -> Result<T, CallError> {
        let body = request.map(written).transpose()?;
        let (_, text) = self.ask("POST", path, body)?;
        understood("the API's answer", &text)
    }

    fn put<T: DeserializeOwned>(&self, path: &str, request: &impl Serialize) -> Result<Put<T>, CallError> {
        let (status, text) = self.ask("PUT", path, Some(written(request)?))?;
        Ok(Put { object: understood("the API's answer", &text)?, made: status == 201 })
    }

    /// Returns the status and the body of a successful answer.
    fn ask(&self, method: &str, path: &str, body: Option<Vec<u8>>) -> Result<(u16, Vec<u8>), CallError> {
        let answer = self.open(method, path, body)?;
        Ok((answer.status, answer.read(ANSWER).map_err(unread)?))
    }

    /// Returns a successful answer whose body is still to be read.
    fn open(&self, method: &str, path: &str, body: Option<Vec<u8>>) -> Result<Answer, CallError> {
        let silent = |error| CallError::NoAnswer { socket: self.socket.clone(), error };
        let answer = http::request(&self.socket, method, path, body.as_deref()).map_err(silent)?;
        if (200..300).contains(&answer.status) {
            return Ok(answer);
        }
        let status = answer.status;
        let broken = |error| CallError::Broken { what: "the API's error cannot be read", error };
        let text = answer.read(ANSWER).map_err(broken)?;
        Err(serde_json::from_slice(&text).map_or(CallError::Status(status), CallError::Refused))
    }
}

fn unread(error: io::Error) -> CallError {
    CallError::Broken { what: "the API's answer cannot be read", error }
}

fn understood<T: DeserializeOwned>(what: &'static str, text: &[u8]) -> Result<T, CallError> {
    serde_json::from_slice(text).map_err(|error| CallError::NotUnderstood { what, error })
}

/// Writes a request as JSON. Fields that are not given are omitted, because an older API refuses fields it does not know.
fn written(request: &impl Serialize) -> Result<Vec<u8>, CallError> {
    let not_written = |error| CallError::NotUnderstood { what: "the request", error };
    let mut value = serde_json::to_value(request).map_err(not_written)?;
    leave_out_null(&mut value);
    serde_json::to_vec(&value).map_err(not_written)
}

fn leave_out_null(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(leave_out_null);
        }
        Value::Array(items) => items.iter_mut().for_each(leave_out_null),
        _ => {}
    }
}

fn with_query(mut path: String, fields: impl Iterator<Item = (&'static str, String)>) -> String {
    for (number, (name, value)) in fields.enumerate() {
        path.push_str(&format!("{}{name}={value}", if number == 0 { "?" } else { "&" }));
    }
    path
}

/// Escapes a name for use in a path. Invalid names are sent too, and the API refuses them.
fn escaped(name: &str) -> String {
    let mut part = String::new();
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            part.push(char::from(byte));
        } else {
            part.push_str(&format!("%{byte:02X}"));
        }
    }
    part
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_omits_fields_that_are_not_set() {
        let mut request = VmRequest { placement: Some(Default::default()), ..VmRequest::default() };
        request.time.weight = Some(7);
        let text = written(&request).expect("JSON");
        let value: Value = serde_json::from_slice(&text).expect("JSON");
        assert_eq!(value["weight"], 7);
        assert!(value.get("memory_bytes").is_none() && value["placement"].get("gpu").is_none(), "{value}");
        assert_eq!(serde_json::from_slice::<VmRequest>(&text).expect("a request"), request);
    }

    #[test]
    fn name_with_path_characters_is_percent_encoded() {
        assert_eq!(escaped("../host"), "..%2Fhost");
        assert_eq!(escaped("acme/web-1"), "acme%2Fweb-1");
        let query = [("a", "1".to_owned()), ("b", escaped("x&y"))];
        assert_eq!(with_query("/p".to_owned(), query.into_iter()), "/p?a=1&b=x%26y");
        assert_eq!(with_query("/p".to_owned(), std::iter::empty()), "/p");
    }
}
