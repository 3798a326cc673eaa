#![expect(unsafe_code, reason = "requests the groups of a peer from the kernel")]

//! The caller at the other end of a connection, and its rights.
//!
//! The kernel reports the caller: user, group, process, and all groups the process is in. The configuration gives its rights.
//! Root and the user of this process may do everything, because they could anyway.

use std::{
    os::fd::{AsRawFd as _, BorrowedFd},
    sync::Arc,
};

use sluice_api::Error;
use tokio::net::UnixStream;

use crate::configuration::{Role, RoleAccess};

/// Limit of groups of a peer that are read; Linux allows 65,536, which no real process has.
const GROUPS: usize = 1024;

/// The caller of a request.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) pid: i32,
    /// True if the connection is on the read-only socket.
    pub(crate) reading: bool,
    grants: Arc<[Grant]>,
}

/// The rights of one role.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Grant {
    Admin,
    Operator,
    Organisation(String),
    Project(String),
    ReadOnly,
}

/// The roles of users and groups.
#[derive(Debug)]
pub(crate) struct Directory {
    own: u32,
    access: Vec<RoleAccess>,
}

impl Directory {
    pub(crate) fn new(access: Vec<RoleAccess>) -> Self {
        Self { own: rustix::process::geteuid().as_raw(), access }
    }

    /// True if a user other than root and the user of this process has a role.
    pub(crate) fn is_shared(&self) -> bool {
        !self.access.is_empty()
    }

    /// The caller at the other end of a connection.
    pub(crate) fn caller(&self, stream: &UnixStream, reading: bool) -> std::io::Result<Caller> {
        let peer = stream.peer_cred()?;
        let (uid, gid) = (peer.uid(), peer.gid());
        let mut groups = supplementary(std::os::fd::AsFd::as_fd(stream))?;
        groups.push(gid);
        Ok(Caller { uid, gid, pid: peer.pid().unwrap_or(0), reading, grants: self.grants(uid, &groups) })
    }

    fn grants(&self, uid: u32, groups: &[u32]) -> Arc<[Grant]> {
        let every = (uid == 0 || uid == self.own).then_some(Grant::Admin);
        let is_meant = |access: &&RoleAccess| {
            access.uids.contains(&uid) || access.gids.iter().any(|gid| groups.contains(gid))
        };
        let grant = |access: &RoleAccess| match (access.role, &access.organisation, &access.project) {
            (Role::Admin, ..) => Some(Grant::Admin),
            (Role::Operator, ..) => Some(Grant::Operator),
            (Role::ReadOnly, ..) => Some(Grant::ReadOnly),
            (Role::Tenant, Some(organisation), _) => Some(Grant::Organisation(organisation.clone())),
            (Role::Tenant, None, Some(project)) => Some(Grant::Project(project.clone())),
            (Role::Tenant, None, None) => None,
        };
        every.into_iter().chain(self.access.iter().filter(is_meant).filter_map(grant)).collect()
    }
}

impl Caller {
    /// True if the caller has any role.
    pub(crate) fn is_known(&self) -> bool {
        !self.grants.is_empty()
    }

    /// Checks that the caller may read everything.
    pub(crate) fn may_read(&self) -> Result<(), Error> {
        self.need(|grant| matches!(grant, Grant::Admin | Grant::Operator | Grant::ReadOnly), "read-only")
    }

    /// Checks that the caller may change all VMs and units.
    pub(crate) fn may_operate(&self) -> Result<(), Error> {
        self.need(|grant| matches!(grant, Grant::Admin | Grant::Operator), "operator")
    }

    /// Checks that the caller may set quotas.
    pub(crate) fn may_administer(&self) -> Result<(), Error> {
        self.need(|grant| matches!(grant, Grant::Admin), "admin")
    }

    /// Checks that the caller may change something, at least objects of its own.
    pub(crate) fn may_do_something(&self) -> Result<(), Error> {
        self.need(|grant| *grant != Grant::ReadOnly, "tenant")
    }

    /// Checks that the caller may read objects of an organisation and project.
    pub(crate) fn may_see(&self, organisation: Option<&str>, project: Option<&str>) -> Result<(), Error> {
        self.may_read().or_else(|_| self.is_tenant(organisation, project))
    }

    /// Checks that the caller may create, change and delete objects of an organisation and project.
    pub(crate) fn may_manage(&self, organisation: Option<&str>, project: Option<&str>) -> Result<(), Error> {
        self.may_operate().or_else(|_| self.is_tenant(organisation, project))
    }

    fn is_tenant(&self, organisation: Option<&str>, project: Option<&str>) -> Result<(), Error> {
        let is_of = |grant: &Grant| match grant {
            Grant::Organisation(name) => organisation == Some(name),
            Grant::Project(name) => project == Some(name),
            _ => false,
        };
        self.need(is_of, "operator, or tenant of its project or organisation")
    }

    fn need(&self, is_enough: impl Fn(&Grant) -> bool, role: &str) -> Result<(), Error> {
        if self.grants.iter().any(is_enough) {
            return Ok(());
        }
        Err(Error::forbidden(format!(
            "user {} may not do that: it needs the role {role}, which an [[access]] of the configuration gives",
            self.uid
        )))
    }
}

/// The error for a caller without a role.
pub(crate) fn no_role() -> Error {
    Error::forbidden("the caller has no role: an [[access]] of the configuration gives one")
}

/// The supplementary groups of the peer, as of the time it connected.
fn supplementary(socket: BorrowedFd<'_>) -> std::io::Result<Vec<u32>> {
    let mut groups = vec![0_u32; GROUPS];
    let mut length = libc::socklen_t::try_from(size_of_val(groups.as_slice())).unwrap_or(0);
    // SAFETY: this function owns the buffer, and `length` is its size; the kernel writes no more and stores the written length.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERGROUPS,
            groups.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        let error = std::io::Error::last_os_error();
        // The process was in no group, or in more than the limit.
        return match error.raw_os_error() {
            Some(libc::ENODATA | libc::ERANGE) => Ok(Vec::new()),
            _ => Err(error),
        };
    }
    groups.truncate(usize::try_from(length).unwrap_or(0) / size_of::<u32>());
    Ok(groups)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A caller for the tests of other modules.
    pub(crate) fn tenant() -> Caller {
        caller(&directory(), 300, &[])
    }

    pub(crate) fn operator() -> Caller {
        caller(&directory(), 200, &[])
    }

    pub(crate) fn administrator() -> Caller {
        caller(&directory(), 0, &[])
    }

    fn caller(directory: &Directory, uid: u32, groups: &[u32]) -> Caller {
        Caller { uid, gid: 0, pid: 1, reading: false, grants: directory.grants(uid, groups) }
    }

    fn directory() -> Directory {
        let access = |role, uids: &[u32], gids: &[u32]| RoleAccess {
            role,
            uids: uids.to_vec(),
            gids: gids.to_vec(),
            organisation: None,
            project: None,
        };
        let of = |access, organisation: Option<&str>, project: Option<&str>| RoleAccess {
            organisation: organisation.map(str::to_owned),
            project: project.map(str::to_owned),
            ..access
        };
        Directory {
            own: 100,
            access: vec![
                access(Role::Admin, &[], &[7]),
                access(Role::Operator, &[200], &[]),
                of(access(Role::Tenant, &[300], &[]), Some("acme"), None),
                of(access(Role::Tenant, &[400], &[]), None, Some("web")),
                access(Role::ReadOnly, &[500], &[]),
            ],
        }
    }

    // Promise: A3
    #[test]
    fn role_allows_its_actions_and_no_others() {
        let directory = directory();
        // Read all, operate all, administer, change something; see and manage acme/web, acme/other, other/other.
        let all = [true; 10];
        let operator = [true, true, false, true, true, true, true, true, true, true];
        let organisation = [false, false, false, true, true, true, true, true, false, false];
        let project = [false, false, false, true, true, true, false, false, false, false];
        let reader = [true, false, false, false, true, false, true, false, true, false];
        let nobody = [false; 10];
        for (uid, groups, expected) in [
            (0, &[][..], all),
            (100, &[], all),
            (600, &[7], all),
            (600, &[8, 7], all),
            (200, &[], operator),
            (300, &[], organisation),
            (400, &[], project),
            (500, &[], reader),
            (600, &[8], nobody),
        ] {
            let caller = caller(&directory, uid, groups);
            let mut found = vec![
                caller.may_read().is_ok(),
                caller.may_operate().is_ok(),
                caller.may_administer().is_ok(),
                caller.may_do_something().is_ok(),
            ];
            for (organisation, project) in [("acme", "web"), ("acme", "other"), ("other", "other")] {
                found.push(caller.may_see(Some(organisation), Some(project)).is_ok());
                found.push(caller.may_manage(Some(organisation), Some(project)).is_ok());
            }
            assert_eq!(found, expected, "user {uid}, groups {groups:?}");
            assert_eq!(caller.is_known(), expected.contains(&true));
        }
    }

    #[test]
    fn tenant_without_project_and_organisation_has_no_rights() {
        let directory = directory();
        for uid in [300, 400, 600] {
            assert!(caller(&directory, uid, &[]).may_manage(None, None).is_err());
        }
    }

    #[tokio::test]
    async fn caller_is_the_peer_that_the_kernel_reports() {
        let (ours, _theirs) = UnixStream::pair().expect("a pair");
        let caller = Directory::new(Vec::new()).caller(&ours, false).expect("a peer");
        assert_eq!(caller.uid, rustix::process::geteuid().as_raw());
        assert_eq!(u32::try_from(caller.pid), Ok(std::process::id()));
        assert!(caller.may_administer().is_ok());
    }
}
