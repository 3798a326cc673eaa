//! Compiles lists of rules into filters for the kernel.

#![expect(unsafe_code, reason = "an allocator setting before the filter, and the filter's system call")]

use crate::{ioctls::RequestNumber, refusal};
use rustix::{
    process::{DumpableBehavior, set_dumpable_behavior},
    thread::set_no_new_privs,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
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
    /// True if a host that serves makes no such call in most of its runs.
    rare: bool,
}

/// The lower 32 bits, all that the kernel reads of an `int`.
const LOWER: u64 = 0xffff_ffff;

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
    /// The lower 32 bits are this value or less.
    AtMost(u32),
}

impl Condition {
    const fn bits(argument: u8, mask: u64, value: u64) -> Condition {
        Condition { argument, test: Test::Bits { mask, value } }
    }

    /// The argument has this value; its lower 32 bits count.
    fn is(argument: u8, value: i32) -> Condition {
        Condition::bits(argument, LOWER, u64::from(value.cast_unsigned()))
    }

    /// The argument is a null pointer.
    const fn null(argument: u8) -> Condition {
        Condition::bits(argument, u64::MAX, 0)
    }

    /// The second argument of `ioctl` is this request.
    fn request(number: RequestNumber) -> Condition {
        /// A command that reads and writes, of the type of NVIDIA's module.
        const ESCAPE: u32 = 3 << 30 | (b'F' as u32) << 8;
        /// All of a command but the size of its argument.
        const WITHOUT_SIZE: u64 = 0xc000_ffff;
        match number {
            RequestNumber::Escape(number) => {
                Condition::bits(1, WITHOUT_SIZE, u64::from(ESCAPE | u32::from(number)))
            }
            RequestNumber::Uvm(number) => Condition::bits(1, LOWER, u64::from(number)),
        }
    }

    /// True if an argument of a call is as wanted, as the kernel judges it.
    fn holds(&self, argument: u64) -> bool {
        match self.test {
            Test::Bits { mask, value } => argument & mask == value,
            Test::Other(value) => argument & LOWER != u64::from(value),
            Test::AtMost(value) => argument & LOWER <= u64::from(value),
        }
    }

    fn compile(&self) -> Result<SeccompCondition, seccompiler::BackendError> {
        let (length, operator, value) = match self.test {
            Test::Bits { mask, value } => (SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(mask), value),
            Test::Other(value) => (SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, u64::from(value)),
            Test::AtMost(value) => (SeccompCmpArgLen::Dword, SeccompCmpOp::Le, u64::from(value)),
        };
        SeccompCondition::new(self.argument, length, operator, value)
    }
}

impl Rule {
    const fn new(call: libc::c_long, conditions: Vec<Vec<Condition>>, why: &'static str) -> Rule {
        Rule { call, conditions, why, rare: false }
    }

    /// Matches the call with any arguments.
    #[must_use]
    pub const fn any(call: libc::c_long, why: &'static str) -> Rule {
        Rule::new(call, Vec::new(), why)
    }

    /// Matches the call if argument `argument` is one of these values; its lower 32 bits count.
    #[must_use]
    pub fn one_of(call: libc::c_long, argument: u8, values: &[i32], why: &'static str) -> Rule {
        Rule::new(call, values.iter().map(|value| vec![Condition::is(argument, *value)]).collect(), why)
    }

    /// Matches the call if argument `argument` is none of these values; its lower 32 bits count.
    #[must_use]
    pub fn none_of(call: libc::c_long, argument: u8, values: &[u32], why: &'static str) -> Rule {
        let condition = |value: &u32| Condition { argument, test: Test::Other(*value) };
        Rule::new(call, vec![values.iter().map(condition).collect()], why)
    }

    /// Matches the call if these arguments have these values; their lower 32 bits count. With several lists, any of them suffices.
    #[must_use]
    pub fn exactly(call: libc::c_long, lists: &[&[(u8, i32)]], why: &'static str) -> Rule {
        let condition = |&(argument, value): &(u8, i32)| Condition::is(argument, value);
        Rule::new(call, lists.iter().map(|list| list.iter().map(condition).collect()).collect(), why)
    }

    /// Matches the call if these arguments have no other bits than these; their lower 32 bits count.
    #[must_use]
    pub fn only(call: libc::c_long, arguments: &[(u8, i32)], why: &'static str) -> Rule {
        let condition = |&(argument, bits): &(u8, i32)| {
            Condition::bits(argument, LOWER & !u64::from(bits.cast_unsigned()), 0)
        };
        Rule::new(call, vec![arguments.iter().map(condition).collect()], why)
    }

    /// Matches the call if argument `argument` is a null pointer.
    #[must_use]
    pub fn null(call: libc::c_long, argument: u8, why: &'static str) -> Rule {
        Rule::new(call, vec![vec![Condition::null(argument)]], why)
    }

    /// Matches the call if argument `argument` is this number or less; its lower 32 bits count.
    #[must_use]
    pub fn at_most(call: libc::c_long, argument: u8, most: u32, why: &'static str) -> Rule {
        Rule::new(call, vec![vec![Condition { argument, test: Test::AtMost(most) }]], why)
    }

    /// Matches the call if argument `argument` is one of these values, without the bits of `flags`; its lower 32 bits count.
    #[must_use]
    pub fn commands(call: libc::c_long, argument: u8, values: &[i32], flags: i32, why: &'static str) -> Rule {
        let mask = LOWER & !u64::from(flags.cast_unsigned());
        let condition = |value: &i32| vec![Condition::bits(argument, mask, u64::from(value.cast_unsigned()))];
        Rule::new(call, values.iter().map(condition).collect(), why)
    }

    /// Matches in one more case: argument `argument` is this value; its lower 32 bits count.
    #[must_use]
    pub fn or_is(mut self, argument: u8, value: i32) -> Rule {
        self.conditions.push(vec![Condition::is(argument, value)]);
        self
    }

    /// Requires, too, that argument `argument` has no other bits than these; its lower 32 bits count.
    #[must_use]
    pub fn and_only(mut self, argument: u8, bits: i32) -> Rule {
        let mask = LOWER & !u64::from(bits.cast_unsigned());
        self.conditions.iter_mut().for_each(|all| all.push(Condition::bits(argument, mask, 0)));
        self
    }

    /// Matches `prlimit64` of the process itself, without a new limit.
    #[must_use]
    pub fn of_self(call: libc::c_long, why: &'static str) -> Rule {
        Rule::new(call, vec![vec![Condition::is(0, 0), Condition::null(2)]], why)
    }

    /// Matches `ioctl` with these requests.
    #[must_use]
    pub fn requests(
        call: libc::c_long,
        requests: impl Iterator<Item = RequestNumber>,
        why: &'static str,
    ) -> Rule {
        Rule::new(call, requests.map(|number| vec![Condition::request(number)]).collect(), why)
    }

    /// Matches in one more case: argument `argument` is `value`, and the first argument is none of descriptors 0 to 2.
    #[must_use]
    pub fn or_beyond_standard_streams(mut self, argument: u8, value: i32) -> Rule {
        let mut case = vec![Condition::is(argument, value)];
        case.extend((0..3).map(|stream| Condition { argument: 0, test: Test::Other(stream) }));
        self.conditions.push(case);
        self
    }

    /// Matches the call if argument `argument` has none of these bits.
    #[must_use]
    pub fn without(call: libc::c_long, argument: u8, bits: i32, why: &'static str) -> Rule {
        let mask = u64::from(bits.cast_unsigned());
        Rule::new(call, vec![vec![Condition::bits(argument, mask, 0)]], why)
    }

    /// Marks a rule for a call that processes make on rare occasions only; `why` names them. A test requires of all other rules that a process
    /// uses them.
    #[must_use]
    pub const fn rare(mut self) -> Rule {
        self.rare = true;
        self
    }

    /// True if processes make the call on rare occasions only.
    #[must_use]
    pub const fn is_rare(&self) -> bool {
        self.rare
    }

    /// True if the rule matches this call, as the filter judges it.
    #[must_use]
    pub fn matches(&self, call: u64, arguments: &[u64; 6]) -> bool {
        let holds = |condition: &Condition| {
            arguments.get(usize::from(condition.argument)).is_some_and(|argument| condition.holds(*argument))
        };
        self.call.cast_unsigned() == call
            && (self.conditions.is_empty() || self.conditions.iter().any(|all| all.iter().all(holds)))
    }

    fn compile(&self) -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
        let compile = |all: &Vec<Condition>| {
            SeccompRule::new(all.iter().map(Condition::compile).collect::<Result<_, _>>()?)
        };
        self.conditions.iter().map(compile).collect()
    }
}

/// The filter of a role.
#[derive(Clone, Debug)]
pub enum FilterProfile {
    /// Lists of allowed calls.
    Allow(AllowList),
    /// A list of forbidden calls, which kill the process; all others are allowed.
    Deny(Vec<Rule>),
}

/// The lists of allowed calls.
#[derive(Clone, Debug)]
pub struct AllowList {
    /// Calls of Sluice's own code, and of the libraries in its programs.
    pub ours: Vec<Rule>,
    /// Calls of the driver.
    pub driver: Vec<Rule>,
    /// Calls that are answered with ENOSYS, because a library tries them and works without.
    pub absent: Vec<Rule>,
    /// Calls that are answered with ENOENT and leave no line in the log, because a library tries them at each start and takes this for an
    /// answer.
    pub missing: Vec<Rule>,
    /// Calls that kill the process, if others are only refused.
    pub fatal: Vec<Rule>,
    /// The answer to all other calls.
    pub otherwise: Otherwise,
}

/// The answer to a call that is on no list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Otherwise {
    /// The process is killed, by SIGSYS.
    Kill,
    /// The call fails with EPERM, and the first of its kind leaves a line in the log.
    Refuse,
}

impl AllowList {
    /// Every call that is not listed kills the process.
    pub(crate) fn strict(ours: Vec<Rule>, driver: Vec<Rule>, absent: Vec<Rule>) -> AllowList {
        AllowList { ours, driver, absent, missing: Vec::new(), fatal: Vec::new(), otherwise: Otherwise::Kill }
    }
}

/// The reason why a filter cannot be entered.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// A list cannot be compiled.
    #[error("cannot compile the filter: {0}")]
    Compile(#[from] seccompiler::BackendError),
    /// The kernel refuses a filter.
    #[error("the kernel refused the filter: {0}")]
    Apply(#[from] std::io::Error),
    /// A thread has a filter of its own, so the process cannot get a common one.
    #[error("thread {0} has another filter")]
    Thread(libc::c_long),
    /// The kernel does not make the process undumpable.
    #[error("cannot make the process undumpable: {0}")]
    Dumpable(rustix::io::Errno),
    /// The kernel does not take the handler for refused calls.
    #[error("cannot install a handler for refused calls: {0}")]
    Handler(std::io::Error),
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
        let conditions = rule.compile()?;
        // Without conditions a call matches always, whatever the other rules for it say.
        match map.get_mut(&rule.call) {
            Some(present) if present.is_empty() => {}
            Some(present) if conditions.is_empty() => present.clear(),
            Some(present) => present.extend(conditions),
            None => drop(map.insert(rule.call, conditions)),
        }
    }
    SeccompFilter::new(map, otherwise, then, ARCH)?.try_into()
}

/// The programs of a profile, in the required order of installation: the last one may forbid installing.
///
/// `fatal` is the action on calls that kill; `refusal` that on calls that are refused.
fn programs(
    profile: &FilterProfile,
    fatal: SeccompAction,
    refusal: SeccompAction,
) -> Result<Vec<BpfProgram>, seccompiler::BackendError> {
    match profile {
        FilterProfile::Deny(denied) => Ok(vec![compile(denied, SeccompAction::Allow, fatal)?]),
        FilterProfile::Allow(AllowList { ours, driver, absent, missing, fatal: attacks, otherwise }) => {
            let mut programs = Vec::new();
            for (answered, error) in [(absent, libc::ENOSYS), (missing, libc::ENOENT)] {
                if !answered.is_empty() {
                    let error = SeccompAction::Errno(error.cast_unsigned());
                    programs.push(compile(answered, SeccompAction::Allow, error)?);
                }
            }
            if !attacks.is_empty() {
                programs.push(compile(attacks, SeccompAction::Allow, fatal.clone())?);
            }
            // The stricter of two filters decides, so these calls have to pass the list of allowed ones.
            let absent = absent.iter().map(|rule| Rule::any(rule.call, rule.why)).collect();
            let all = [ours.clone(), driver.clone(), absent, missing.clone()].concat();
            let otherwise = match otherwise {
                Otherwise::Kill => fatal,
                Otherwise::Refuse => refusal,
            };
            programs.push(compile(&all, otherwise, SeccompAction::Allow)?);
            Ok(programs)
        }
    }
}

/// Installs a program in all threads.
fn install(program: &[seccompiler::sock_filter]) -> Result<(), SandboxError> {
    let length = u16::try_from(program.len())
        .map_err(|_| SandboxError::Apply(std::io::Error::from(std::io::ErrorKind::InvalidInput)))?;
    // The kernel's `sock_fprog`: the number of instructions, and their address.
    #[repr(C)]
    struct Filter {
        length: u16,
        code: *const seccompiler::sock_filter,
    }
    let filter = Filter { length, code: program.as_ptr() };
    // SAFETY: the kernel reads the structure and `length` instructions, both of which live through the call.
    let installed = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_TSYNC,
            &raw const filter,
        )
    };
    match installed {
        0 => Ok(()),
        -1 => Err(SandboxError::Apply(std::io::Error::last_os_error())),
        thread => Err(SandboxError::Thread(thread)),
    }
}

/// Enters the filter of a role. With `one_heap`, all threads share a heap.
pub(crate) fn enter(
    role: &dyn core::fmt::Debug,
    profile: &FilterProfile,
    one_heap: bool,
) -> Result<(), SandboxError> {
    let (fatal, refusal) = match std::env::var("SLUICE_SECCOMP").as_deref() {
        Err(_) | Ok("" | "kill") => (SeccompAction::KillProcess, SeccompAction::Trap),
        Ok("log") => {
            tracing::warn!(
                ?role,
                "SLUICE_SECCOMP=log: forbidden system calls are only logged. NOT FOR PRODUCTION"
            );
            (SeccompAction::Log, SeccompAction::Log)
        }
        Ok("off") => {
            tracing::warn!(?role, "SLUICE_SECCOMP=off: this process is not confined. NOT FOR PRODUCTION");
            return Ok(());
        }
        Ok(other) => return Err(SandboxError::Setting(other.to_owned())),
    };
    if one_heap {
        // One heap for all threads: they allocate little, and each heap reserves memory.
        // SAFETY: sets a number in the allocator; no memory is involved.
        let set = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
        debug_assert_eq!(set, 1, "a parameter the allocator has");
    }
    // The launcher's children have another image after exec, which resets this; they set it themselves.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(SandboxError::Dumpable)?;
    set_no_new_privs(true).map_err(std::io::Error::from)?;
    if matches!(profile, FilterProfile::Allow(list) if list.otherwise == Otherwise::Refuse) {
        refusal::answer().map_err(SandboxError::Handler)?;
    }
    for program in programs(profile, fatal, refusal)? {
        install(&program)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Role;
    use std::collections::HashSet;

    fn lists(role: Role) -> [Vec<Rule>; 5] {
        match role.profile() {
            FilterProfile::Allow(AllowList { ours, driver, absent, missing, fatal, .. }) => {
                [ours, driver, absent, missing, fatal]
            }
            FilterProfile::Deny(denied) => [denied, Vec::new(), Vec::new(), Vec::new(), Vec::new()],
        }
    }

    // Promise: F4
    #[test]
    fn every_rule_has_a_reason_and_every_call_one_rule() {
        for role in Role::all() {
            for list in lists(role) {
                let mut seen = HashSet::new();
                for rule in list {
                    assert!(rule.why.len() > 8, "{role:?}: call {} has no reason", rule.call);
                    assert!(seen.insert(rule.call), "{role:?}: call {} has two rules", rule.call);
                }
            }
        }
    }

    #[test]
    fn filter_of_every_role_compiles() {
        for role in Role::all() {
            let compiled = programs(&role.profile(), SeccompAction::KillProcess, SeccompAction::Trap);
            assert!(compiled.is_ok(), "{role:?}");
        }
    }

    // Promise: F4
    #[test]
    fn own_calls_of_each_role_stay_within_their_number() {
        for role in Role::all() {
            let [ours, ..] = lists(role);
            let most = match role {
                Role::Device | Role::DirectDevice => 40,
                Role::Arbiter(_) | Role::Worker(_) | Role::WorkerSettled => 45,
                Role::Inventory(_) => 35,
                // Its list is of forbidden calls.
                Role::Launcher => continue,
            };
            assert!(ours.len() <= most, "{role:?}: {}", ours.len());
        }
    }

    #[test]
    fn rule_without_conditions_outweighs_one_with_conditions() {
        let (any, some) = (Rule::any(1, "any arguments"), Rule::one_of(1, 0, &[7], "one argument"));
        let compiled = |rules: &[Rule]| {
            compile(rules, SeccompAction::KillProcess, SeccompAction::Allow).expect("a program").len()
        };
        let alone = compiled(std::slice::from_ref(&any));
        assert_eq!(compiled(&[any.clone(), some.clone()]), alone);
        assert_eq!(compiled(&[some.clone(), any]), alone);
        assert!(compiled(&[some]) > alone);
    }
}
