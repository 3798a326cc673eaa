//! Compiles lists of rules into filters for the kernel.

#![expect(unsafe_code, reason = "an allocator setting before the filter")]

use crate::Role;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter_all_threads,
};
use std::collections::BTreeMap;

/// A system call that is allowed or denied, with the reason.
#[derive(Clone, Debug)]
pub struct Rule {
    /// The call's number.
    pub call: libc::c_long,
    /// The call matches if all conditions of any list hold; an empty list of lists matches all calls.
    conditions: Vec<Vec<Condition>>,
    /// The code path that makes the call.
    pub why: &'static str,
}

/// A condition on one argument.
#[derive(Clone, Copy, Debug)]
struct Condition {
    argument: u8,
    test: Test,
}

#[derive(Clone, Copy, Debug)]
enum Test {
    /// The masked bits have this value.
    Bits { mask: u64, value: u64 },
    /// The lower 32 bits differ from this value.
    Other(u32),
}

impl Condition {
    const fn bits(argument: u8, mask: u64, value: u64) -> Condition {
        Condition { argument, test: Test::Bits { mask, value } }
    }

    fn compile(&self) -> Result<SeccompCondition, seccompiler::BackendError> {
        let (length, operator, value) = match self.test {
            Test::Bits { mask, value } => (SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(mask), value),
            Test::Other(value) => (SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, u64::from(value)),
        };
        SeccompCondition::new(self.argument, length, operator, value)
    }
}

impl Rule {
    /// Matches the call with any arguments.
    #[must_use]
    pub const fn any(call: libc::c_long, why: &'static str) -> Rule {
        Rule { call, conditions: Vec::new(), why }
    }

    /// Matches the call if argument `argument` is one of these values; its lower 32 bits count.
    #[must_use]
    pub fn one_of(call: libc::c_long, argument: u8, values: &[i32], why: &'static str) -> Rule {
        let condition =
            |value: &i32| vec![Condition::bits(argument, 0xffff_ffff, u64::from(value.cast_unsigned()))];
        Rule { call, conditions: values.iter().map(condition).collect(), why }
    }

    /// Matches the call if argument `argument` is none of these values; its lower 32 bits count.
    #[must_use]
    pub fn none_of(call: libc::c_long, argument: u8, values: &[u32], why: &'static str) -> Rule {
        let condition = |value: &u32| Condition { argument, test: Test::Other(*value) };
        Rule { call, conditions: vec![values.iter().map(condition).collect()], why }
    }

    /// Matches the call if these arguments have these values; their lower 32 bits count. With several lists, any of them suffices.
    #[must_use]
    pub fn exactly(call: libc::c_long, lists: &[&[(u8, i32)]], why: &'static str) -> Rule {
        let condition = |&(argument, value): &(u8, i32)| {
            Condition::bits(argument, 0xffff_ffff, u64::from(value.cast_unsigned()))
        };
        Rule {
            call,
            conditions: lists.iter().map(|list| list.iter().map(condition).collect()).collect(),
            why,
        }
    }

    /// Matches in one more case: argument `argument` is `value`, and the first argument is none of descriptors 0 to 2.
    #[must_use]
    pub fn or_beyond_standard_streams(mut self, argument: u8, value: i32) -> Rule {
        let mut case = vec![Condition::bits(argument, 0xffff_ffff, u64::from(value.cast_unsigned()))];
        case.extend((0..3).map(|stream| Condition { argument: 0, test: Test::Other(stream) }));
        self.conditions.push(case);
        self
    }

    /// Matches the call if argument `argument` has none of these bits.
    #[must_use]
    pub fn without(call: libc::c_long, argument: u8, bits: i32, why: &'static str) -> Rule {
        let mask = u64::from(bits.cast_unsigned());
        Rule { call, conditions: vec![vec![Condition::bits(argument, mask, 0)]], why }
    }

    /// Matches the call if argument `argument` has all of these bits.
    #[must_use]
    pub fn with(call: libc::c_long, argument: u8, bits: i32, why: &'static str) -> Rule {
        let mask = u64::from(bits.cast_unsigned());
        Rule { call, conditions: vec![vec![Condition::bits(argument, mask, mask)]], why }
    }

    fn compile(&self) -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
        let compile = |all: &Vec<Condition>| {
            SeccompRule::new(all.iter().map(Condition::compile).collect::<Result<_, _>>()?)
        };
        self.conditions.iter().map(compile).collect()
    }
}

/// The list of a role.
#[derive(Clone, Debug)]
pub enum FilterProfile {
    /// A list of allowed calls; every other call kills the process.
    Allow {
        /// The allowed calls.
        allowed: Vec<Rule>,
        /// Calls that are answered with ENOSYS, because a library tries them and works without.
        absent: Vec<Rule>,
    },
    /// A list of forbidden calls, which kill the process; all others are allowed.
    Deny(Vec<Rule>),
}

/// The reason why a filter cannot be entered.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// A list cannot be compiled.
    #[error("cannot compile the filter: {0}")]
    Compile(#[from] seccompiler::BackendError),
    /// The kernel refuses a filter.
    #[error("the kernel refused the filter: {0}")]
    Apply(#[from] seccompiler::Error),
    /// The kernel does not make the process undumpable.
    #[error("cannot make the process undumpable: {0}")]
    Dumpable(rustix::io::Errno),
    /// `SLUICE_SECCOMP` is none of `kill`, `log`, `off`.
    #[error("SLUICE_SECCOMP must be kill, log or off, not {0:?}")]
    Setting(String),
}

#[cfg(target_arch = "x86_64")]
const ARCH: TargetArch = TargetArch::x86_64;

fn compile(
    rules: &[Rule],
    otherwise: SeccompAction,
    then: SeccompAction,
) -> Result<BpfProgram, seccompiler::BackendError> {
    let mut map: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for rule in rules {
        map.entry(rule.call).or_default().extend(rule.compile()?);
    }
    SeccompFilter::new(map, otherwise, then, ARCH)?.try_into()
}

/// The programs of a profile, in the required order of installation: the last one may forbid installing.
fn programs(
    profile: &FilterProfile,
    fatal: SeccompAction,
) -> Result<Vec<BpfProgram>, seccompiler::BackendError> {
    match profile {
        FilterProfile::Deny(denied) => Ok(vec![compile(denied, SeccompAction::Allow, fatal)?]),
        FilterProfile::Allow { allowed, absent } => {
            // The stricter of two filters decides, so absent calls have to pass the list of allowed ones.
            let enosys = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
            let mut all = allowed.clone();
            all.extend(absent.iter().map(|rule| Rule::any(rule.call, rule.why)));
            let mut programs = vec![compile(&all, fatal, SeccompAction::Allow)?];
            if !absent.is_empty() {
                programs.insert(0, compile(absent, SeccompAction::Allow, enosys)?);
            }
            Ok(programs)
        }
    }
}

pub(crate) fn enter(role: Role) -> Result<(), SandboxError> {
    let fatal = match std::env::var("SLUICE_SECCOMP").as_deref() {
        Err(_) | Ok("" | "kill") => SeccompAction::KillProcess,
        Ok("log") => {
            tracing::warn!(
                ?role,
                "SLUICE_SECCOMP=log: forbidden system calls are only logged. NOT FOR PRODUCTION"
            );
            SeccompAction::Log
        }
        Ok("off") => {
            tracing::warn!(?role, "SLUICE_SECCOMP=off: this process is not confined. NOT FOR PRODUCTION");
            return Ok(());
        }
        Ok(other) => return Err(SandboxError::Setting(other.to_owned())),
    };
    if matches!(role, Role::Device | Role::DirectDevice) {
        // One heap for all threads: they allocate little, and each heap reserves memory.
        // SAFETY: sets a number in the allocator; no memory is involved.
        let set = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
        debug_assert_eq!(set, 1, "a parameter the allocator has");
    }
    // The launcher's children have another image after exec, which resets this; they set it themselves.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(SandboxError::Dumpable)?;
    for program in programs(&role.profile(), fatal)? {
        // Sets no_new_privs first.
        apply_filter_all_threads(&program)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const ROLES: [Role; 7] = [
        Role::Device,
        Role::DirectDevice,
        Role::Arbiter,
        Role::Worker,
        Role::WorkerSettled,
        Role::Inventory,
        Role::Launcher,
    ];

    fn rules(role: Role) -> Vec<Rule> {
        match role.profile() {
            FilterProfile::Allow { allowed, absent } => [allowed, absent].concat(),
            FilterProfile::Deny(denied) => denied,
        }
    }

    // Promise: F4
    #[test]
    fn every_rule_has_a_reason_and_every_call_one_rule() {
        for role in ROLES {
            let mut seen = HashSet::new();
            for rule in rules(role) {
                assert!(rule.why.len() > 8, "{role:?}: call {} has no reason", rule.call);
                assert!(seen.insert(rule.call), "{role:?}: call {} has two rules", rule.call);
            }
        }
    }

    #[test]
    fn filter_of_every_role_compiles() {
        for role in ROLES {
            assert!(programs(&role.profile(), SeccompAction::KillProcess).is_ok(), "{role:?}");
        }
    }

    #[test]
    fn allowed_calls_of_each_role_stay_within_their_number() {
        let allowed = |role: Role| match role.profile() {
            FilterProfile::Allow { allowed, .. } => allowed.len(),
            FilterProfile::Deny(_) => 0,
        };
        assert!(allowed(Role::Device) <= 48, "{}", allowed(Role::Device));
        assert!(allowed(Role::WorkerSettled) <= 85, "{}", allowed(Role::WorkerSettled));
        assert!(allowed(Role::Arbiter) <= 112, "{}", allowed(Role::Arbiter));
        assert!(allowed(Role::Worker) <= 110, "{}", allowed(Role::Worker));
        assert!(allowed(Role::Inventory) <= 80, "{}", allowed(Role::Inventory));
    }
}
