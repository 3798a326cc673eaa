//! `/metrics` of the real sluiced, and the shipped alert rules and dashboard.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::{Duration, Instant},
};

use crate::common::{Daemon, Front, Place, request};
use serde_json::json;
use sluice_kit::wait::until;

fn serve(place: &Place) -> Daemon {
    place.daemon().nvml().units(1).vm_numbers("1:2000").serve()
}

fn scrape(socket: &Path) -> String {
    let reply = request(socket, "GET /metrics HTTP/1.0\r\n", b"").expect("an answer");
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.body.as_str().expect("text").to_owned()
}

/// The value of a series, by its name and labels as written in the text.
fn value(text: &str, series: &str) -> Option<f64> {
    let line =
        text.lines().find(|line| line.strip_prefix(series).is_some_and(|rest| rest.starts_with(' ')))?;
    line.rsplit(' ').next()?.parse().ok()
}

/// The names of all declared metrics, with or without a value.
fn declared(text: &str) -> BTreeSet<String> {
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let names =
        types.map(|(name, kind)| if kind == "counter" { format!("{name}_total") } else { name.to_owned() });
    names.chain(names_of_samples(text)).collect()
}

fn names_of_samples(text: &str) -> BTreeSet<String> {
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    samples.filter_map(|line| line.split(['{', ' ']).next()).map(str::to_owned).collect()
}

fn shipped(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(path)
}

// Promise: A22
#[test]
fn metrics_match_the_api_and_follow_the_conventions() {
    let place = Place::new();
    let daemon = serve(&place);
    let wanted =
        json!({ "memory_bytes": 64 << 20, "guarantee_permille": 250, "weight": 300, "direct": true });
    let vm = place.api("PUT", "/v1/vms/web-1", Some(&wanted)).body;
    let labels = r#"{vm="web-1",organisation="",project=""}"#;
    let socket = place.run().join("api.sock");
    // The VM may run before the arbiter of its unit has reported.
    let lending = r#"sluice_unit_state{unit="0",state="lending"}"#;
    let is_up =
        |text: &String| value(text, lending) == Some(1.0) && value(text, "sluice_inventory_up") == Some(1.0);
    let text = until(|| scrape(&socket), is_up);
    let of_vm = |text: &str, name: &str| value(text, &format!("{name}{labels}"));
    assert_eq!(of_vm(&text, "sluice_vm_memory_limit_bytes"), Some(f64::from(64 << 20)), "{text}");
    assert_eq!(of_vm(&text, "sluice_vm_gpu_guarantee_ratio"), Some(0.25));
    assert_eq!(of_vm(&text, "sluice_vm_gpu_weight"), Some(300.0));
    assert_eq!(of_vm(&text, "sluice_vm_sessions"), Some(0.0));
    assert_eq!(value(&text, "sluice_ready"), Some(1.0));
    assert_eq!(value(&text, "sluice_inventory_up"), Some(1.0));
    assert_eq!(value(&text, lending), Some(1.0), "{text}");
    assert_eq!(value(&text, r#"sluice_unit_vms{unit="0"}"#), Some(1.0));
    assert_eq!(value(&text, r#"sluice_vms{state="running"}"#), Some(1.0));
    assert_eq!(
        value(&text, r#"sluice_events_total{kind="drift"}"#),
        Some(0.0),
        "the counter does not begin at 0"
    );
    assert!(value(&text, "process_resident_memory_bytes").is_some_and(|bytes| bytes > 1e6), "{text}");
    assert!(text.ends_with("# EOF\n"));
    // The used memory appears with the report of the unit.
    let number = vm["number"].as_u64().expect("a number");
    let mut front = Front::connect(vm["connect"]["socket"].as_str().expect("a socket").as_ref());
    front.open(1);
    place.tell("unit-0", &format!("has {number} {} 0", 32 << 20));
    let text = until(
        || scrape(&socket),
        |text| of_vm(text, "sluice_vm_memory_used_bytes") == Some(f64::from(32 << 20)),
    );
    assert_eq!(of_vm(&text, "sluice_vm_memory_used_bytes"), Some(f64::from(32 << 20)));
    assert_eq!(of_vm(&text, "sluice_vm_sessions"), Some(1.0));
    assert_eq!(of_vm(&text, "sluice_vm_sessions_started_total"), Some(1.0));
    place.tell("unit-0", &format!("work {number} 7 3 {} 1000", 4 << 20));
    place.tell("unit-0", &format!("pinned {number} {}", 16 << 20));
    place.tell("unit-0", &format!("upkeep 12 {} 1500000000 {}", 24 << 20, 6 << 20));
    assert_eq!(place.api("POST", "/v1/vms/web-1/fence", Some(&json!({}))).status, 200);
    place.tell("inventory", "xid 0 31 0");
    let text = until(
        || scrape(&socket),
        |text| {
            value(text, r#"sluice_gpu_faults_total{class="session"}"#) == Some(1.0)
                && value(text, r#"sluice_unit_drift_bytes{unit="0"}"#).is_some()
                && of_vm(text, "sluice_vm_memory_pinned_bytes") != Some(0.0)
        },
    );
    assert_eq!(of_vm(&text, "sluice_vm_memory_pinned_bytes"), Some(f64::from(16 << 20)), "{text}");
    assert_eq!(of_vm(&text, "sluice_vm_launches_total"), Some(7.0));
    assert_eq!(of_vm(&text, "sluice_vm_copies_total"), Some(3.0));
    assert_eq!(of_vm(&text, "sluice_vm_copied_bytes_total"), Some(f64::from(4 << 20)));
    assert_eq!(of_vm(&text, "sluice_vm_calls_total"), Some(1000.0));
    assert_eq!(value(&text, r#"sluice_unit_scrubs_total{unit="0"}"#), Some(12.0));
    assert_eq!(value(&text, r#"sluice_unit_scrubbed_bytes_total{unit="0"}"#), Some(f64::from(24 << 20)));
    assert_eq!(value(&text, r#"sluice_unit_scrub_seconds_total{unit="0"}"#), Some(1.5));
    assert_eq!(value(&text, r#"sluice_unit_drift_bytes{unit="0"}"#), Some(f64::from(6 << 20)));
    assert_eq!(value(&text, r#"sluice_gpu_faults_total{class="session"}"#), Some(1.0));
    assert_eq!(value(&text, r#"sluice_gpu_mig_enabled{gpu="0"}"#), Some(0.0));
    assert_eq!(of_vm(&text, "sluice_vm_fences_begun_total"), Some(1.0));
    assert!(of_vm(&text, "sluice_vm_fence_seconds_total").is_some_and(|took| took > 0.0 && took < 60.0));
    // The read-only socket serves the metrics, too.
    assert_eq!(value(&scrape(&place.run().join("api-read.sock")), "sluice_ready"), Some(1.0));
    // The names of counters end with _total, and no label shows a process or an address.
    for line in text.lines().filter(|line| line.starts_with("# TYPE ")) {
        let mut words = line.split(' ').skip(2);
        let (name, kind) = (words.next().expect("a name"), words.next().expect("a kind"));
        let counts = names_of_samples(&text).contains(&format!("{name}_total"));
        assert!(kind != "counter" || counts || !names_of_samples(&text).contains(name), "{line}");
        assert!(name.starts_with("sluice_") || name.starts_with("process_"), "{line}");
    }
    for label in ["pid=", "process=", "address=", "session="] {
        assert!(!text.contains(label), "{label}");
    }
    daemon.end();
}

// Promise: A23
#[test]
fn rules_and_dashboard_name_only_existing_metrics() {
    let place = Place::new();
    let daemon = serve(&place);
    let tree = json!({ "memory_bytes": 64 << 20 });
    assert_eq!(place.api("PUT", "/v1/organisations/o", Some(&tree)).status, 201);
    let wanted = json!({ "memory_bytes": 64 << 20, "organisation": "o" });
    let number = place.api("PUT", "/v1/vms/a", Some(&wanted)).body["number"].clone();
    // Some metrics exist only for a fenced VM and for a VM with an event.
    assert_eq!(place.api("POST", "/v1/vms/a/fence", Some(&json!({}))).status, 200);
    place.tell("unit-0", &format!("event 9 {number} 0 0"));
    let socket = place.run().join("api.sock");
    let text = until(|| scrape(&socket), |text| names_of_samples(text).contains("sluice_vm_events_total"));
    let there = declared(&text);
    for file in ["prometheus/sluice-alerts.yml", "prometheus/sluice-alerts.test.yml", "grafana/sluice.json"] {
        let content = std::fs::read_to_string(shipped(file)).expect("a shipped file");
        let words = content.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let named: BTreeSet<&str> =
            words.filter(|word| word.starts_with("sluice_") || word.starts_with("process_")).collect();
        assert!(named.len() > 10, "{file} names only {named:?}");
        let missing: Vec<_> = named.iter().filter(|name| !there.contains(**name)).collect();
        assert!(missing.is_empty(), "{file} names {missing:?}, which do not exist:\n{text}");
    }
    let dashboard = std::fs::read_to_string(shipped("grafana/sluice.json")).expect("a shipped file");
    let dashboard: serde_json::Value = serde_json::from_str(&dashboard).expect("JSON");
    assert!(dashboard["panels"].as_array().is_some_and(|panels| panels.len() > 10));
    daemon.end();
}

// Promise: A41
#[test]
fn series_of_vms_of_one_name_differ_in_a_label() {
    let place = Place::new();
    let daemon = serve(&place);
    // Organisations share only a unit with figures per process.
    assert_eq!(place.tell("unit-0", "figures 1"), "said");
    let figures = || place.unit(0)["figures_per_process"].clone();
    assert_eq!(until(figures, |figures| *figures == true), true);
    for organisation in ["o", "p"] {
        let path = format!("/v1/organisations/{organisation}");
        assert_eq!(place.api("PUT", &path, Some(&json!({ "memory_bytes": 64 << 20 }))).status, 201);
        let wanted = json!({ "memory_bytes": 16 << 20, "organisation": organisation });
        let made = place.api("PUT", "/v1/vms/a", Some(&wanted));
        assert_eq!(made.status, 201, "{made:?}");
        place.tell("unit-0", &format!("event 9 {} 0 0", made.body["number"]));
    }
    let socket = place.run().join("api.sock");
    let events = |text: &str| text.lines().filter(|line| line.starts_with("sluice_vm_events_total{")).count();
    let text = until(|| scrape(&socket), |text| events(text) == 2);
    let series: Vec<&str> = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| Some(line.rsplit_once(' ')?.0))
        .collect();
    let distinct: BTreeSet<&str> = series.iter().copied().collect();
    assert_eq!(series.len(), distinct.len(), "a series occurs twice:\n{text}");
    assert_eq!(events(&text), 2, "{text}");
    daemon.end();
}

// Promise: A23
#[test]
fn promtool_accepts_the_rules_and_each_is_raised() {
    let rules = shipped("prometheus/sluice-alerts.yml");
    let named = std::env::var_os("SLUICE_PROMTOOL").filter(|path| !path.is_empty());
    let promtool = named.unwrap_or_else(|| "promtool".into());
    let run = |arguments: &[&str]| -> Option<Output> {
        let mut command = Command::new(&promtool);
        command.args(arguments).current_dir(shipped("prometheus"));
        match command.output() {
            Ok(output) => Some(output),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => panic!("promtool: {error}"),
        }
    };
    let Some(checked) = run(&["check", "rules", "sluice-alerts.yml"]) else {
        sluice_skip::skip("promtool (Debian package prometheus) is not there");
        return;
    };
    assert!(checked.status.success(), "{checked:?}");
    let tested = run(&["test", "rules", "sluice-alerts.test.yml"]).expect("promtool");
    assert!(tested.status.success(), "{}", String::from_utf8_lossy(&tested.stderr));
    // Each alert has a test case and a runbook.
    let read = |path: &Path| std::fs::read_to_string(path).expect("a shipped file");
    let cases = read(&shipped("prometheus/sluice-alerts.test.yml"));
    let runbooks = read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operations.md"));
    let rules = read(&rules);
    let alerts: Vec<_> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(alerts.len() > 15);
    for alert in alerts {
        assert!(cases.contains(&format!("- name: {alert}\n")), "{alert} has no case");
        assert!(runbooks.contains(&format!("### {alert}\n")), "{alert} has no runbook");
    }
}

/// Figures for docs/performance.md; the limits leave room for a busy machine.
// Promise: A22
#[test]
fn five_hundred_vms_are_scraped_in_time() {
    let place = Place::new();
    let daemon = serve(&place);
    (0..500).for_each(|number| place.make_one_of_many(number));
    let socket = place.run().join("api.sock");
    let mut times: Vec<Duration> = (0..20)
        .map(|_| {
            let start = Instant::now();
            let text = scrape(&socket);
            let took = start.elapsed();
            assert_eq!(value(&text, r#"sluice_vms{state="running"}"#), Some(500.0));
            took
        })
        .collect();
    times.sort_unstable();
    println!(
        "scrape of 500 VMs: median {:?}, longest {:?}; {} bytes",
        times[10],
        times[19],
        scrape(&socket).len()
    );
    assert!(times[10] < Duration::from_secs(1), "a scrape takes {:?}", times[10]);
    daemon.end();
}
