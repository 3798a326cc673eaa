//! Who may connect and what they may do, with processes that are really of other users and groups. Needs root.

mod common;

use std::{
    fs::Permissions,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use common::{Place, Reply, has_users, make_program, parse, signal, until, watch};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Of nobody on any host, one hopes; the kernel does not ask.
const ADMINS: u32 = 61_001;
const OPERATOR: u32 = 61_002;
const TENANT: u32 = 61_003;
const PROJECT: u32 = 61_004;
const READER: u32 = 61_005;
const NOBODY: u32 = 61_006;
const MACHINES: u32 = 61_010;
const TENANT_OF_EVIL: u32 = 61_011;
const STRANGERS: u32 = 61_020;

/// A user and the groups of its process.
#[derive(Clone, Copy, Debug)]
struct User {
    uid: u32,
    gid: u32,
    groups: &'static [u32],
}

impl User {
    const fn new(uid: u32) -> Self {
        Self { uid, gid: uid, groups: &[] }
    }

    /// The client, as a process of the user's.
    fn client(self, place: &Place, socket: &Path) -> Command {
        let mut command = Command::new("setpriv");
        command.args([format!("--reuid={}", self.uid), format!("--regid={}", self.gid)]);
        match self.groups {
            [] => command.arg("--clear-groups"),
            groups => {
                let groups: Vec<String> = groups.iter().map(u32::to_string).collect();
                command.arg(format!("--groups={}", groups.join(",")))
            }
        };
        command.arg(place.directory.path().join("client")).arg(socket);
        command
    }

    /// Connects to a socket, and says something there.
    fn connect(self, place: &Place, socket: &Path, request: Option<&str>) -> Output {
        self.client(place, socket).args(request).output().expect("setpriv")
    }

    /// Asks the management API.
    fn ask(self, place: &Place, socket: &str, method: &str, path: &str, body: Option<&Value>) -> Reply {
        let body = body.map(Value::to_string).unwrap_or_default();
        let kind = if body.is_empty() { "" } else { "Content-Type: application/json\r\n" };
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: sluice\r\nConnection: close\r\n{kind}Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let said = self.connect(place, &place.run().join(socket), Some(&request));
        assert!(said.status.success(), "{self:?}: {}", String::from_utf8_lossy(&said.stderr));
        parse(&said.stdout).expect("an answer")
    }
}

/// A place that others may enter, with the client in it. Nothing where there is no root to become others.
fn shared_place() -> Option<Place> {
    if !has_users(ADMINS.into(), 100) {
        println!("SKIP: needs root, and users from {ADMINS} on");
        return None;
    }
    let place = Place::new();
    let client: PathBuf = place.directory.path().join("client");
    make_program(Path::new(env!("CARGO_BIN_EXE_sluice-stand-in")), &client);
    for path in [place.directory.path(), &client, &place.run()] {
        std::fs::set_permissions(path, Permissions::from_mode(0o755)).expect("opened");
    }
    Some(place)
}

struct Daemon(Child);

impl Daemon {
    fn start(place: &Place, configuration: &str) -> Self {
        let file = place.directory.path().join("sluiced.toml");
        std::fs::write(&file, configuration).expect("written");
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluiced"));
        command.arg("--config").arg(file).arg("--runtime-dir").arg(place.run());
        command.arg("--libexec").arg(place.libexec()).arg("--driver").arg(place.driver());
        command.args(["--units", "1", "--vm-numbers", "1:100"]).env("SLUICE_LOG", "off").stdin(Stdio::null());
        let daemon = Self(command.spawn().expect("sluiced"));
        let ready = || place.try_api("GET", "/readyz", None).is_ok_and(|reply| reply.status == 200);
        assert!(until(ready, |ready| *ready), "sluiced is not ready");
        daemon
    }

    fn end(mut self) {
        signal(&watch(self.0.id()).expect("sluiced"), Signal::TERM);
        assert!(self.0.wait().expect("sluiced").success());
    }
}

// Promise: A3
#[test]
fn processes_of_other_users_may_do_what_their_role_says() {
    let Some(place) = shared_place() else { return };
    let daemon = Daemon::start(
        &place,
        &format!(
            "[[access]]\nrole = \"admin\"\ngids = [{ADMINS}]\n\
             [[access]]\nrole = \"operator\"\nuids = [{OPERATOR}]\n\
             [[access]]\nrole = \"tenant\"\nuids = [{TENANT}]\norganisation = \"acme\"\n\
             [[access]]\nrole = \"tenant\"\ngids = [{PROJECT}]\nproject = \"web\"\n\
             [[access]]\nrole = \"read-only\"\nuids = [{READER}]\n"
        ),
    );
    let acme = json!({ "memory_bytes": 1 << 30 });
    let web = json!({ "memory_bytes": 1 << 29, "organisation": "acme" });
    let of = |owner: Value| {
        let mut vm = json!({ "memory_bytes": 64 << 20 });
        vm.as_object_mut().expect("an object").extend(owner.as_object().expect("an object").clone());
        vm
    };
    let (in_acme, in_web) = (of(json!({ "organisation": "acme" })), of(json!({ "project": "web" })));
    for (path, wanted) in [
        ("/v1/organisations/acme", &acme),
        ("/v1/projects/web", &web),
        ("/v1/vms/a", &in_acme),
        ("/v1/vms/w", &in_web),
        ("/v1/vms/o", &of(json!({}))),
    ] {
        assert_eq!(place.api("PUT", path, Some(wanted)).status, 201, "{path}");
    }
    let nothing = json!({});
    let looks = ["/v1/vms/a", "/v1/vms/w", "/v1/vms/o", "/v1/units", "/v1/placement/suggestions", "/metrics"];
    let changes: [(&str, &str, Option<&Value>); 6] = [
        ("PUT", "/v1/vms/a", Some(&in_acme)),
        ("PUT", "/v1/vms/w", Some(&in_web)),
        ("POST", "/v1/vms/o/drain", None),
        ("POST", "/v1/vms/w/fence", Some(&nothing)),
        ("POST", "/v1/vms/w/readmit", None),
        ("PUT", "/v1/organisations/acme", Some(&acme)),
    ];
    let divided = json!({ "enabled": true });
    let moves: [(&str, &str, Option<&Value>); 5] = [
        ("PUT", "/v1/gpus/0/mig", Some(&divided)),
        ("POST", "/v1/gpus/0/drain", None),
        ("POST", "/v1/units/0/drain", None),
        ("POST", "/v1/units/0/readmit", None),
        ("POST", "/v1/vms/o/move", Some(&nothing)),
    ];
    let (yes, no) = (true, false);
    for (user, sees, may_look, may_change) in [
        (User { gid: ADMINS, ..User::new(NOBODY) }, &["a", "o", "w"][..], [yes; 6], [yes; 6]),
        (User { groups: &[7, ADMINS], ..User::new(NOBODY) }, &["a", "o", "w"], [yes; 6], [yes; 6]),
        (User::new(OPERATOR), &["a", "o", "w"], [yes; 6], [yes, yes, yes, yes, yes, no]),
        (User::new(TENANT), &["a", "w"], [yes, yes, no, no, no, no], [yes, yes, no, yes, no, no]),
        (
            User { groups: &[PROJECT], ..User::new(NOBODY) },
            &["w"],
            [no, yes, no, no, no, no],
            [no, yes, no, yes, no, no],
        ),
        (User::new(READER), &["a", "o", "w"], [yes; 6], [no; 6]),
    ] {
        for socket in ["api.sock", "api-read.sock"] {
            let list = user.ask(&place, socket, "GET", "/v1/vms", None);
            let names = list.body["vms"].as_array().expect("VMs").iter().map(|vm| vm["id"].as_str());
            assert_eq!(names.flatten().collect::<Vec<_>>(), sees, "{user:?}");
            for (path, may) in looks.into_iter().zip(may_look) {
                let reply = user.ask(&place, socket, "GET", path, None);
                assert_eq!(reply.status, if may { 200 } else { 403 }, "{user:?}: {socket} {path} {reply:?}");
            }
            // Who may not drain a VM of somebody else may not change where VMs are.
            for (method, path, body) in moves.into_iter().filter(|_| !may_change[2]) {
                let reply = user.ask(&place, socket, method, path, body);
                assert_eq!(reply.status, 403, "{user:?}: {socket} {method} {path} {reply:?}");
            }
            for ((method, path, body), may) in changes.into_iter().zip(may_change) {
                let reply = user.ask(&place, socket, method, path, body);
                let may = may && socket == "api.sock";
                let expected = if may { 200 } else { 403 };
                assert_eq!(reply.status, expected, "{user:?}: {socket} {method} {path} {reply:?}");
                if path == "/v1/vms/w/fence" && may {
                    let log = std::fs::read_to_string(place.run().join("audit.log")).expect("an audit log");
                    let last: Value =
                        serde_json::from_str(log.lines().last().expect("a line")).expect("JSON");
                    assert_eq!((&last["action"], &last["uid"]), (&json!("vm.fence"), &json!(user.uid)));
                }
            }
            for vm in ["o", "w"] {
                // Fenced or drained by one of them, as it may be.
                let status = place.api("POST", &format!("/v1/vms/{vm}/readmit"), None).status;
                assert!(matches!(status, 200 | 409), "{status}");
            }
        }
    }
    let nobody = User::new(NOBODY);
    for socket in ["api.sock", "api-read.sock"] {
        for path in looks.into_iter().chain(["/v1/vms", "/healthz", "/v1/usage", "/v1/events"]) {
            assert_eq!(nobody.ask(&place, socket, "GET", path, None).status, 403, "{path}");
        }
        for (method, path, body) in changes {
            assert_eq!(nobody.ask(&place, socket, method, path, body).status, 403, "{method} {path}");
        }
    }
    daemon.end();
}

/// Clients that run until this is dropped.
struct Clients(Vec<Child>);

impl Drop for Clients {
    fn drop(&mut self) {
        for client in &mut self.0 {
            _ = client.kill();
            _ = client.wait();
        }
    }
}

// Promise: A52
#[test]
fn operator_is_answered_within_a_second_while_strangers_and_tenants_flood() {
    let Some(place) = shared_place() else { return };
    let daemon = Daemon::start(
        &place,
        &format!(
            "[[access]]\nrole = \"operator\"\nuids = [{OPERATOR}]\n\
             [[access]]\nrole = \"tenant\"\nuids = [{TENANT}]\norganisation = \"acme\"\n"
        ),
    );
    let acme = json!({ "memory_bytes": 1 << 30 });
    assert_eq!(place.api("PUT", "/v1/organisations/acme", Some(&acme)).status, 201);
    for (path, vm) in [("/v1/vms/a", json!({ "organisation": "acme" })), ("/v1/vms/o", json!({}))] {
        assert_eq!(place.api("PUT", path, Some(&vm)).status, 201);
    }
    assert_eq!(place.api("POST", "/v1/vms/a/fence", Some(&json!({}))).status, 200);
    let lines = || std::fs::read_to_string(place.run().join("audit.log")).expect("a log").lines().count();
    let before = lines();
    let socket = place.run().join("api.sock");
    let start = |uid: u32, arguments: [&str; 2]| {
        let mut client = User::new(uid).client(&place, &socket);
        client.args(arguments).stderr(Stdio::null()).spawn().expect("setpriv")
    };
    let fence = "POST /v1/vms/a/fence HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}";
    let mut clients: Vec<_> = (0..9).map(|number| start(STRANGERS + number, ["--hold", "32"])).collect();
    clients.extend((0..2).map(|_| start(TENANT, ["--flood", fence])));
    let mut clients = Clients(clients);
    // Until those are there that hold their places.
    std::thread::sleep(std::time::Duration::from_millis(500));
    let operator = User::new(OPERATOR);
    let mut took = Vec::new();
    for (method, path) in [("GET", "/healthz"), ("POST", "/v1/vms/o/drain"), ("GET", "/v1/vms")].repeat(8) {
        let start = std::time::Instant::now();
        let reply = operator.ask(&place, "api.sock", method, path, None);
        took.push(start.elapsed());
        assert_eq!(reply.status, 200, "{method} {path}: {reply:?}");
    }
    took.sort();
    println!(
        "an operator waits {:?} at the median, {:?} at most",
        took[took.len() / 2],
        took[took.len() - 1]
    );
    assert!(took[took.len() - 1] < std::time::Duration::from_secs(1), "{took:?}");
    let alive = clients.0.iter_mut().filter_map(|client| client.try_wait().expect("a child"));
    assert_eq!(alive.collect::<Vec<_>>(), [], "a client has ended meanwhile");
    drop(clients);
    assert_eq!(lines(), before + 1, "a fence of a VM that is fenced leaves a line");
    daemon.end();
}

// Promise: A50
#[test]
fn tenants_see_the_usage_of_their_own_vms_when_a_name_is_used_again() {
    let Some(place) = shared_place() else { return };
    let tenant = |uid: u32, organisation: &str| {
        format!("[[access]]\nrole = \"tenant\"\nuids = [{uid}]\norganisation = \"{organisation}\"\n")
    };
    let daemon = Daemon::start(&place, &(tenant(TENANT, "acme") + &tenant(TENANT_OF_EVIL, "evil")));
    let evil = User::new(TENANT_OF_EVIL);
    let acme = User::new(TENANT);
    for organisation in ["acme", "evil"] {
        let path = format!("/v1/organisations/{organisation}");
        assert_eq!(place.api("PUT", &path, Some(&json!({ "memory_bytes": 1 << 30 }))).status, 201);
    }
    let vm = |organisation: &str| json!({ "organisation": organisation });
    let path = "/v1/vms/secret-db";
    assert_eq!(acme.ask(&place, "api.sock", "PUT", path, Some(&vm("acme"))).status, 201);
    let seconds = |user: User| {
        let usage = user.ask(&place, "api.sock", "GET", "/v1/usage", None).body;
        let lines = usage["vms"].as_array().expect("VMs").clone();
        assert!(lines.iter().all(|line| line["id"] == "secret-db"), "{lines:?}");
        lines.iter().map(|line| line["seconds"].as_f64().expect("seconds")).collect::<Vec<_>>()
    };
    let used = until(|| seconds(acme), |seconds| seconds.first().is_some_and(|seconds| *seconds > 1.0));
    assert_eq!((used.len(), seconds(evil).len()), (1, 0));
    assert_eq!(acme.ask(&place, "api.sock", "DELETE", path, None).status, 204);
    assert_eq!(evil.ask(&place, "api.sock", "PUT", path, Some(&vm("evil"))).status, 201);
    let evils = until(|| seconds(evil), |seconds| !seconds.is_empty());
    let acmes = seconds(acme);
    assert_eq!((acmes.len(), evils.len()), (1, 1));
    assert!(acmes[0] >= used[0], "a tenant is told less than before");
    let whole = place.api("GET", "/v1/usage", None).body;
    assert_eq!(whole["vms"].as_array().map(Vec::len), Some(2));
    let of_evil = &whole["organisations"].as_array().expect("organisations")[1];
    assert!(evils[0] <= of_evil["seconds"].as_f64().expect("seconds"), "{whole}");
    daemon.end();
}

// Promise: A24
#[test]
fn only_whom_the_configuration_names_connects_to_a_vms_socket() {
    let Some(place) = shared_place() else { return };
    let directory = place.run();
    let close = || std::fs::set_permissions(&directory, Permissions::from_mode(0o700)).expect("closed");
    let stands = |path: &Path| {
        let about = std::fs::metadata(path).expect("it is there");
        (about.gid(), about.mode() & 0o777)
    };
    let socket = directory.join("vm-1.sock");
    let member = User { groups: &[MACHINES], ..User::new(NOBODY) };
    let connects = |user: User| user.connect(&place, &socket, None).status.success();
    let make = || assert_eq!(place.api("PUT", "/v1/vms/1", Some(&json!({}))).status, 201);

    close();
    let daemon = Daemon::start(&place, "");
    make();
    let own = rustix::process::getegid().as_raw();
    assert_eq!((stands(&socket), stands(&directory)), ((own, 0o600), (own, 0o700)));
    assert!(!connects(member));
    // And it is not the directory alone that keeps them out.
    std::fs::set_permissions(&directory, Permissions::from_mode(0o755)).expect("opened");
    assert!(!connects(member));
    assert_eq!(place.api("DELETE", "/v1/vms/1", None).status, 204);
    daemon.end();

    close();
    let daemon = Daemon::start(&place, &format!("vm-socket-gid = {MACHINES}\n"));
    make();
    assert_eq!((stands(&socket), stands(&directory)), ((MACHINES, 0o660), (MACHINES, 0o710)));
    assert!(connects(member) && connects(User { gid: MACHINES, ..User::new(NOBODY) }));
    assert!(!connects(User::new(NOBODY)));
    assert!(!directory.join("api.sock").metadata().is_ok_and(|api| api.mode() & 0o077 != 0));
    daemon.end();
}
