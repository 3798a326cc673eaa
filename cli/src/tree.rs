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
    /// How many VMs; as many as there can be if not given
    #[arg(long, value_name = "N")]
    vms: Option<u32>,
}

impl Quota {
    fn request(&self) -> Map<String, Value> {
        let mut request = Map::from_iter([("memory_bytes".to_owned(), self.memory.0.into())]);
        request.extend(self.vms.map(|vms| ("vms".to_owned(), vms.into())));
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
        SizeCommand::Set { named, share } => {
            let mut request = Map::new();
            share.enter(&mut request);
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
