//! Organisations, projects and sizes.

use anyhow::Result;
use clap::Subcommand;
use serde_json::{Map, Value, json};
use sluice_daemon::configuration::Size;

use crate::{
    api::{Api, part, plain},
    table::{Table, bytes, items, text},
    vms::Share,
};

#[derive(Debug, Subcommand)]
pub(crate) enum Organisation {
    /// List organisations
    List(Asked),
    /// Show an organisation
    Show(Named),
    /// Make an organisation, or change what it may have
    Set {
        #[command(flatten)]
        named: Named,
        #[command(flatten)]
        quota: Quota,
    },
    /// Take an organisation away, in which there is nothing
    Delete(Named),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Project {
    /// List projects
    List(Asked),
    /// Show a project
    Show(Named),
    /// Make a project, or change what it may have
    Set {
        #[command(flatten)]
        named: Named,
        #[command(flatten)]
        quota: Quota,
        /// Its organisation
        #[arg(long, value_name = "NAME")]
        organisation: Option<String>,
    },
    /// Take a project away, in which there is no VM
    Delete(Named),
}

#[derive(Debug, Subcommand)]
pub(crate) enum SizeCommand {
    /// List sizes
    List(Asked),
    /// Show a size
    Show(Named),
    /// Make a size, or change what VMs of it get; those that are there keep what they have
    Set {
        #[command(flatten)]
        named: Named,
        #[command(flatten)]
        share: Share,
        /// The kind of unit, where a VM does not say one
        #[arg(long, value_parser = ["mig", "time-slice", "any"])]
        policy: Option<String>,
        /// The kind of MIG instance, where a VM does not say one
        #[arg(long, value_name = "PROFILE")]
        profile: Option<String>,
        /// The most VMs that share a unit
        #[arg(long, value_name = "N")]
        replicas: Option<u32>,
    },
    /// Take a size away
    Delete(Named),
}

#[derive(Debug, clap::Args)]
pub(crate) struct Asked {
    #[command(flatten)]
    api: Api,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Named {
    #[command(flatten)]
    api: Api,
    /// Its name
    name: String,
}

/// What VMs may have together.
#[derive(Debug, clap::Args)]
pub(crate) struct Quota {
    /// Device memory on all units, for instance 64GiB
    #[arg(long, value_name = "SIZE")]
    memory: Size,
    /// How many VMs; if not given, 64 for tenants, and for operators as many as there can be
    #[arg(long, value_name = "N")]
    vms: Option<u32>,
    #[command(flatten)]
    limits: Limits,
}

/// What tenants may set of their VMs. What is not given has a default that takes nothing from others.
#[derive(Debug, clap::Args)]
struct Limits {
    /// A size that tenants may have, whose figures then hold exactly; repeatable [default: any memory]
    #[arg(long = "allow-size", value_name = "NAME")]
    sizes: Vec<String>,
    /// The largest weight [default: 100]
    #[arg(long, value_name = "N")]
    max_weight: Option<u32>,
    /// The highest priority [default: normal]
    #[arg(long, value_parser = ["low", "normal", "high"])]
    max_priority: Option<String>,
    /// The largest cap in thousandths of a unit's time, which a VM without one gets [default: none]
    #[arg(long, value_name = "N")]
    max_cap: Option<u32>,
    /// The largest guarantee in thousandths of a unit's time [default: 0]
    #[arg(long, value_name = "N")]
    max_guarantee: Option<u32>,
    /// The strictest isolation [default: shared]
    #[arg(long, value_parser = ["shared", "strict", "strict-plus"])]
    max_isolation: Option<String>,
    /// The largest headroom [default: 0]
    #[arg(long, value_name = "SIZE")]
    max_headroom: Option<Size>,
    /// The most guest memory that may be pinned, which a VM that does not say gets [default: none]
    #[arg(long, value_name = "SIZE")]
    max_pinned: Option<Size>,
    /// The shortest time after which a VM is readmitted without an operator [default: tenants may not say one]
    #[arg(long, value_name = "SECONDS")]
    min_readmit_after: Option<u32>,
    /// Let tenants choose GPU, slice, profile, multiprocessors and NUMA node
    #[arg(long)]
    allow_unit_choice: bool,
    /// The most VMs that one user makes [default: 16]
    #[arg(long, value_name = "N")]
    vms_per_owner: Option<u32>,
}

impl Limits {
    fn request(&self) -> Map<String, Value> {
        let size = |size: Option<Size>| size.map(|size| size.0.into());
        let given: [(&str, Option<Value>); 11] = [
            ("sizes", (!self.sizes.is_empty()).then(|| self.sizes.clone().into())),
            ("weight", self.max_weight.map(Into::into)),
            ("priority", self.max_priority.clone().map(Into::into)),
            ("cap_permille", self.max_cap.map(Into::into)),
            ("guarantee_permille", self.max_guarantee.map(Into::into)),
            ("isolation", self.max_isolation.clone().map(Into::into)),
            ("headroom_bytes", size(self.max_headroom)),
            ("pinned_bytes", size(self.max_pinned)),
            ("readmit_after_seconds", self.min_readmit_after.map(Into::into)),
            ("unit_choice", self.allow_unit_choice.then_some(true.into())),
            ("vms_per_owner", self.vms_per_owner.map(Into::into)),
        ];
        given.into_iter().filter_map(|(field, value)| Some((field.to_owned(), value?))).collect()
    }
}

impl Quota {
    fn request(&self) -> Map<String, Value> {
        let mut request = Map::from_iter([("memory_bytes".to_owned(), self.memory.0.into())]);
        request.extend(self.vms.map(|vms| ("vms".to_owned(), vms.into())));
        let limits = self.limits.request();
        request.extend((!limits.is_empty()).then(|| ("limits".to_owned(), limits.into())));
        request
    }
}

/// Organisations.
pub(crate) fn organisation(command: &Organisation) -> Result<()> {
    const KIND: Kind = Kind { list: "organisations", name: "organisation", show: ancestors };
    match command {
        Organisation::List(asked) => KIND.all(asked),
        Organisation::Show(named) => KIND.one(named),
        Organisation::Set { named, quota } => KIND.set(named, quota.request()),
        Organisation::Delete(named) => KIND.delete(named),
    }
}

/// Projects.
pub(crate) fn project(command: &Project) -> Result<()> {
    const KIND: Kind = Kind { list: "projects", name: "project", show: ancestors };
    match command {
        Project::List(asked) => KIND.all(asked),
        Project::Show(named) => KIND.one(named),
        Project::Set { named, quota, organisation } => {
            let mut request = quota.request();
            request.extend(organisation.clone().map(|name| ("organisation".to_owned(), name.into())));
            KIND.set(named, request)
        }
        Project::Delete(named) => KIND.delete(named),
    }
}

/// Sizes.
pub(crate) fn size(command: &SizeCommand) -> Result<()> {
    const KIND: Kind = Kind { list: "sizes", name: "size", show: sizes };
    match command {
        SizeCommand::List(asked) => KIND.all(asked),
        SizeCommand::Show(named) => KIND.one(named),
        SizeCommand::Set { named, share, policy, profile, replicas } => {
            let mut request = Map::new();
            share.enter(&mut request);
            request.extend(policy.clone().map(|policy| ("policy".to_owned(), policy.into())));
            request.extend(profile.clone().map(|profile| ("profile".to_owned(), profile.into())));
            request.extend(replicas.map(|replicas| ("replicas".to_owned(), replicas.into())));
            KIND.set(named, request)
        }
        SizeCommand::Delete(named) => KIND.delete(named),
    }
}

/// What all three are alike in.
struct Kind {
    /// The list's name, in the path and in its answer.
    list: &'static str,
    name: &'static str,
    show: fn(&[Value]) -> Table,
}

impl Kind {
    fn path(&self, named: &Named) -> String {
        format!("/v1/{}/{}", self.list, part(&named.name))
    }

    fn all(&self, asked: &Asked) -> Result<()> {
        let list = asked.api.get(&format!("/v1/{}", self.list))?;
        asked.api.print(&list, |list| (self.show)(items(&list[self.list])).to_string())
    }

    fn one(&self, named: &Named) -> Result<()> {
        let object = named.api.get(&self.path(named))?;
        named.api.print(&object, |object| (self.show)(std::slice::from_ref(object)).to_string())
    }

    fn set(&self, named: &Named, request: Map<String, Value>) -> Result<()> {
        let (object, made) = named.api.ask("PUT", &self.path(named), Some(&request.into()))?;
        let done = if made { "made" } else { "as said" };
        named.api.print(&object, |_| format!("{} {} is {done}", self.name, plain(&named.name)))
    }

    fn delete(&self, named: &Named) -> Result<()> {
        named.api.ask("DELETE", &self.path(named), None)?;
        named.api.print(&json!({}), |_| format!("{} {} is gone", self.name, plain(&named.name)))
    }
}

fn ancestors(all: &[Value]) -> Table {
    let mut table = Table::new(&["NAME", "ORGANISATION", ">MEMORY", ">OF", ">VMS", "FROM"]);
    for one in all {
        table.row([
            text(&one["id"]),
            text(&one["organisation"]),
            bytes(&one["lent_bytes"]),
            bytes(&one["memory_bytes"]),
            text(&one["vms"]),
            if one["configured"] == true { "configuration".to_owned() } else { "API".to_owned() },
        ]);
    }
    table
}

fn sizes(all: &[Value]) -> Table {
    let mut table = Table::new(&["NAME", ">MEMORY", ">KEPT", ">WEIGHT", "PRIORITY", ">CAP", ">GUARANTEE"]);
    for one in all {
        table.row([
            text(&one["id"]),
            bytes(&one["memory_bytes"]),
            bytes(&one["guaranteed_bytes"]),
            text(&one["weight"]),
            text(&one["priority"]),
            text(&one["cap_permille"]),
            text(&one["guarantee_permille"]),
        ]);
    }
    table
}
