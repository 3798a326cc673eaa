//! A client of the management API, with a function for each of its operations.
//!
//! It blocks, and each request has a connection of its own. Names of things go into paths escaped, so that a name that is none is refused
//! by the API and not taken for another path.

use std::{io, path::PathBuf};

use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use crate::{
    Error,
    http::{self, Answer},
    v1::{
        Capacity, Division, Event, EventsQuery, FenceRequest, Gpu, Gpus, Host, MoveQuery, Organisation,
        OrganisationRequest, Organisations, Project, ProjectRequest, Projects, Size, SizeRequest, Sizes,
        Suggestions, Unit, Units, Usage, Vm, VmRequest, Vms, Well, Wishes, WouldFit,
    },
};

/// Bytes of an answer: some ten thousand VMs.
const ANSWER: u64 = 64 << 20;
/// Bytes of an event.
const EVENT: u64 = 64 << 10;

/// The management API at a socket.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
}

/// A request has no answer that says what was asked for.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// No sluiced answers.
    #[error("no sluiced answers at {}", socket.display())]
    NoAnswer {
        /// Where.
        socket: PathBuf,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// The API refuses.
    #[error("{}", .0.message)]
    Refused(Error),
    /// The API refuses, and does not say why as it should.
    #[error("the API answers with status {0}")]
    Status(u16),
    /// Something of the answer does not come.
    #[error("{what}")]
    Broken {
        /// How far it came.
        what: &'static str,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// The answer is not what the API describes.
    #[error("{what} is {}", if error.is_data() { "not what this version knows" } else { "not JSON" })]
    NotUnderstood {
        /// The part of it.
        what: &'static str,
        /// Why.
        #[source]
        error: serde_json::Error,
    },
}

/// What came of a PUT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Put<T> {
    /// The object as it is now.
    pub object: T,
    /// Whether it was not there before.
    pub made: bool,
}

/// Events, as they come.
#[derive(Debug)]
pub struct Events(Answer);

impl Iterator for Events {
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

/// Each function is an operation of the API, and fails when the API refuses or does not answer.
impl Client {
    /// The API at a socket, which need not be there yet.
    pub fn at(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into() }
    }

    /// Whether the daemon answers.
    pub fn health(&self) -> Result<Well, CallError> {
        self.get("/healthz")
    }

    /// Whether every unit lends and every VM has its device; a refusal says why not.
    pub fn readiness(&self) -> Result<Well, CallError> {
        self.get("/readyz")
    }

    /// Metrics, in the text form of OpenMetrics.
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

    /// Makes a VM, or changes it to be as said.
    pub fn put_vm(&self, name: &str, request: &VmRequest) -> Result<Put<Vm>, CallError> {
        self.put(&format!("/v1/vms/{}", escaped(name)), request)
    }

    /// Ends a VM.
    pub fn delete_vm(&self, name: &str) -> Result<(), CallError> {
        self.ask("DELETE", &format!("/v1/vms/{}", escaped(name)), None).map(drop)
    }

    /// Fences a VM.
    pub fn fence_vm(&self, name: &str, request: &FenceRequest) -> Result<Vm, CallError> {
        self.post(&format!("/v1/vms/{}/fence", escaped(name)), Some(request))
    }

    /// Lets a VM that was fenced or drained have sessions again.
    pub fn readmit_vm(&self, name: &str) -> Result<Vm, CallError> {
        self.post(&format!("/v1/vms/{}/readmit", escaped(name)), None::<&()>)
    }

    /// Lets a VM begin no session any more.
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

    /// Has a GPU emptied.
    pub fn drain_gpu(&self, gpu: u32) -> Result<Gpu, CallError> {
        self.post(&format!("/v1/gpus/{gpu}/drain"), None::<&()>)
    }

    /// Has VMs come to a GPU again that was emptied.
    pub fn readmit_gpu(&self, gpu: u32) -> Result<Gpu, CallError> {
        self.post(&format!("/v1/gpus/{gpu}/readmit"), None::<&()>)
    }

    /// Switches a GPU to MIG mode, or out of it.
    pub fn put_gpu_mig(&self, gpu: u32, request: &Division) -> Result<Gpu, CallError> {
        self.put(&format!("/v1/gpus/{gpu}/mig"), request).map(|put| put.object)
    }

    /// Says what there is still room for.
    pub fn capacity(&self) -> Result<Capacity, CallError> {
        self.get("/v1/capacity")
    }

    /// Says whether VMs would have a place now.
    pub fn would_fit(&self, wishes: &Wishes) -> Result<WouldFit, CallError> {
        self.post("/v1/capacity/would-fit", Some(wishes))
    }

    /// Says which VMs had better be on other units, and what load is expected.
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

    /// Has a unit emptied.
    pub fn drain_unit(&self, unit: u32) -> Result<(), CallError> {
        self.ask("POST", &format!("/v1/units/{unit}/drain"), None).map(drop)
    }

    /// Takes a unit back into service that is quarantined or drained.
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

    /// Makes an organisation, or changes it to be as said.
    pub fn put_organisation(
        &self,
        name: &str,
        request: &OrganisationRequest,
    ) -> Result<Put<Organisation>, CallError> {
        self.put(&format!("/v1/organisations/{}", escaped(name)), request)
    }

    /// Takes an organisation away.
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

    /// Makes a project, or changes it to be as said.
    pub fn put_project(&self, name: &str, request: &ProjectRequest) -> Result<Put<Project>, CallError> {
        self.put(&format!("/v1/projects/{}", escaped(name)), request)
    }

    /// Takes a project away.
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

    /// Makes a size, or changes it to be as said.
    pub fn put_size(&self, name: &str, request: &SizeRequest) -> Result<Put<Size>, CallError> {
        self.put(&format!("/v1/sizes/{}", escaped(name)), request)
    }

    /// Takes a size away.
    pub fn delete_size(&self, name: &str) -> Result<(), CallError> {
        self.ask("DELETE", &format!("/v1/sizes/{}", escaped(name)), None).map(drop)
    }

    /// Shows what was used.
    pub fn usage(&self) -> Result<Usage, CallError> {
        self.get("/v1/usage")
    }

    /// Follows events.
    pub fn events(&self, query: &EventsQuery) -> Result<Events, CallError> {
        let follow = query.follow.map(|follow| ("follow", follow.to_string()));
        let after = query.after.as_deref().map(|token| ("after", escaped(token)));
        let path = with_query("/v1/events".to_owned(), follow.into_iter().chain(after));
        self.open("GET", &path, None).map(Events)
    }

    /// Any request with a body of JSON or none, whatever its answer says: the status, and the body, which is null where it is empty.
    ///
    /// # Errors
    /// When nothing answers, or not in HTTP.
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

    /// The status and the body of an answer that is no refusal.
    fn ask(&self, method: &str, path: &str, body: Option<Vec<u8>>) -> Result<(u16, Vec<u8>), CallError> {
        let answer = self.open(method, path, body)?;
        Ok((answer.status, answer.read(ANSWER).map_err(unread)?))
    }

    /// An answer whose body is still to be read.
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

/// A request as JSON. A field that is not given is left out: an API that does not know it yet refuses it.
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

/// A name as a part of a path: the API is sent what is no name, too, and says so.
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
    fn request_leaves_out_what_is_not_given() {
        let request =
            VmRequest { weight: Some(7), placement: Some(Default::default()), ..VmRequest::default() };
        let text = written(&request).expect("JSON");
        let value: Value = serde_json::from_slice(&text).expect("JSON");
        assert_eq!(value["weight"], 7);
        assert!(value.get("memory_bytes").is_none() && value["placement"].get("gpu").is_none(), "{value}");
        assert_eq!(serde_json::from_slice::<VmRequest>(&text).expect("a request"), request);
    }

    #[test]
    fn name_that_is_a_path_stays_one_part_of_it() {
        assert_eq!(escaped("../host"), "..%2Fhost");
        assert_eq!(escaped("acme/web-1"), "acme%2Fweb-1");
        let query = [("a", "1".to_owned()), ("b", escaped("x&y"))];
        assert_eq!(with_query("/p".to_owned(), query.into_iter()), "/p?a=1&b=x%26y");
        assert_eq!(with_query("/p".to_owned(), std::iter::empty()), "/p");
    }
}
