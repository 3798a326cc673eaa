//! `cargo xtask ioctls TAG`: compares the table of NVIDIA's requests in `backend/sandbox/src/ioctls.rs` with a release of the
//! published kernel modules.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use sluice_sandbox::ioctls::{BRANCHES, RequestNumber, of_branch};

/// Compare the list of ioctls of NVIDIA's driver with a release of its kernel modules.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Release, such as 580.95.05: a tag of the repository.
    tag: String,
    /// A clone of github.com/NVIDIA/open-gpu-kernel-modules, with or without a work tree.
    #[arg(long, value_name = "PATH", default_value = ".")]
    tree: PathBuf,
}

/// The headers that define requests. Those of `/dev/nvidia-uvm` that are plain numbers stand in the last one only; in the one before, plain
/// numbers are flags and sizes.
const HEADERS: [(&str, HeaderKind); 5] = [
    ("kernel-open/common/inc/nv-ioctl-numbers.h", HeaderKind::Escapes),
    ("kernel-open/common/inc/nv-ioctl-numa.h", HeaderKind::Escapes),
    ("src/nvidia/arch/nvalloc/unix/include/nv_escape.h", HeaderKind::Escapes),
    ("kernel-open/nvidia-uvm/uvm_ioctl.h", HeaderKind::Uvm { plain: false }),
    ("kernel-open/nvidia-uvm/uvm_linux_ioctl.h", HeaderKind::Uvm { plain: true }),
];

#[derive(Clone, Copy, Debug)]
enum HeaderKind {
    /// Requests of `/dev/nvidiactl` and `/dev/nvidiaN`.
    Escapes,
    /// Requests of `/dev/nvidia-uvm`; `plain` if numbers without a macro are requests.
    Uvm { plain: bool },
}

/// Requests by name.
type RequestTable = BTreeMap<String, RequestNumber>;

/// Prints the differences; returns true if there are none.
pub(crate) fn run(options: &Options) -> Result<bool> {
    let number = options.tag.split('.').next().unwrap_or_default();
    let branch: u16 =
        number.parse().with_context(|| format!("{} begins with no number of a branch", options.tag))?;
    let (listed, release) = nearest(branch).context("every branch with a list is newer")?;
    if listed != branch {
        println!("branch {branch} has no list; compared with that of branch {listed}");
    }
    let mut theirs = RequestTable::new();
    for (path, kind) in HEADERS {
        requests(&header(options, path)?, kind, &mut theirs).with_context(|| path.to_owned())?;
    }
    let ours: RequestTable =
        of_branch(listed).map(|(_, request)| (request.name.to_owned(), request.number)).collect();
    let differences = differences(&ours, &theirs);
    println!(
        "{}: {} requests; list of branch {listed}, read at {release}: {}",
        options.tag,
        theirs.len(),
        ours.len()
    );
    for difference in &differences {
        println!("{difference}");
    }
    Ok(differences.is_empty())
}

/// The newest branch with a list that is not newer than this one.
fn nearest(branch: u16) -> Option<(u16, &'static str)> {
    BRANCHES.into_iter().rev().find(|(listed, _)| *listed <= branch)
}

fn header(options: &Options, path: &str) -> Result<String> {
    let object = format!("{}:{path}", options.tag);
    let output = Command::new("git").arg("-C").arg(&options.tree).args(["show", &object]).output()?;
    if !output.status.success() {
        bail!("git show {object}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// Adds the requests that a header defines.
fn requests(text: &str, kind: HeaderKind, table: &mut RequestTable) -> Result<()> {
    /// The number to which `NV_IOCTL_BASE` has always been defined; the headers that use it include one another.
    const BASE: u32 = 200;
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let (Some("#define"), Some(name)) = (words.next(), words.next()) else { continue };
        let value: String =
            words.take_while(|word| !word.starts_with("//") && !word.starts_with("/*")).collect();
        if name == "NV_IOCTL_BASE" {
            ensure!(literal(&value) == Some(BASE), "NV_IOCTL_BASE is {value}");
        }
        let number = match kind {
            HeaderKind::Escapes if name.starts_with("NV_ESC_") => {
                let sum = value.strip_prefix("(NV_IOCTL_BASE+").and_then(|rest| rest.strip_suffix(')'));
                let number = match sum {
                    Some(rest) => literal(rest).map(|number| number + BASE),
                    None => literal(&value),
                };
                let number = number.and_then(|number| u8::try_from(number).ok());
                RequestNumber::Escape(number.with_context(|| format!("{name} is {value}"))?)
            }
            HeaderKind::Uvm { plain } if name.starts_with("UVM_") => {
                let of_macro = value.strip_prefix("UVM_IOCTL_BASE(").and_then(|rest| rest.strip_suffix(')'));
                match of_macro.or(plain.then_some(value.as_str())).map(literal) {
                    Some(Some(number)) => RequestNumber::Uvm(number),
                    Some(None) => bail!("{name} is {value}"),
                    None => continue,
                }
            }
            HeaderKind::Escapes | HeaderKind::Uvm { .. } => continue,
        };
        table.insert(name.to_owned(), number);
    }
    Ok(())
}

/// A decimal or hexadecimal number of C.
fn literal(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// A line for each request that only one of the tables has, or that has another number.
fn differences(ours: &RequestTable, theirs: &RequestTable) -> Vec<String> {
    let names: BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
    names
        .into_iter()
        .filter_map(|name| match (ours.get(name), theirs.get(name)) {
            (None, Some(number)) => Some(format!("added: {name} {number:?}")),
            (Some(number), None) => Some(format!("removed: {name} {number:?}")),
            (Some(old), Some(new)) if old != new => Some(format!("renumbered: {name} {old:?}, now {new:?}")),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NUMBERS: &str = "
/* NOTE: text */
#define NV_IOCTL_MAGIC      'F'
#define NV_IOCTL_BASE       200
#define NV_ESC_FIRST             (NV_IOCTL_BASE + 0)
#define NV_ESC_SECOND            (NV_IOCTL_BASE + 17) // text
#define NV_ESC_RM_THIRD          0x2A
";
    const UVM: &str = "
#define UVM_IOCTL_BASE(i) i
#define UVM_RESERVE         UVM_IOCTL_BASE(1)
#define UVM_MAX_PER_CALL 32
#define UVM_FLAG_ASYNC      0x00000001
#define UVM_FLAGS_ALL       (UVM_FLAG_ASYNC | \\
                             1)
";

    fn table(parts: &[(&str, HeaderKind)]) -> RequestTable {
        let mut table = RequestTable::new();
        for (text, kind) in parts {
            requests(text, *kind, &mut table).expect("a header");
        }
        table
    }

    #[test]
    fn header_yields_requests_and_no_flags() {
        let plain = "#define UVM_START  0x30000001\n#endif // _UVM_H";
        let found = table(&[
            (NUMBERS, HeaderKind::Escapes),
            (UVM, HeaderKind::Uvm { plain: false }),
            (plain, HeaderKind::Uvm { plain: true }),
        ]);
        let found: Vec<_> = found.iter().map(|(name, number)| (name.as_str(), *number)).collect();
        assert_eq!(
            found,
            [
                ("NV_ESC_FIRST", RequestNumber::Escape(200)),
                ("NV_ESC_RM_THIRD", RequestNumber::Escape(0x2a)),
                ("NV_ESC_SECOND", RequestNumber::Escape(217)),
                ("UVM_RESERVE", RequestNumber::Uvm(1)),
                ("UVM_START", RequestNumber::Uvm(0x3000_0001)),
            ]
        );
    }

    #[test]
    fn number_in_an_unknown_form_is_an_error() {
        for (text, kind) in [
            ("#define NV_ESC_NEW _IOWR('F', 1, int)", HeaderKind::Escapes),
            ("#define NV_ESC_NEW (NV_IOCTL_BASE + 56)", HeaderKind::Escapes),
            ("#define NV_IOCTL_BASE 100", HeaderKind::Escapes),
            ("#define UVM_NEW UVM_IOCTL_BASE(X)", HeaderKind::Uvm { plain: false }),
        ] {
            assert!(requests(text, kind, &mut RequestTable::new()).is_err(), "{text}");
        }
    }

    #[test]
    fn added_removed_and_renumbered_requests_are_reported() {
        let old = table(&[(NUMBERS, HeaderKind::Escapes)]);
        let new = NUMBERS.replace("0x2A", "0x2B").replace("SECOND", "OTHER");
        let new = table(&[(&new, HeaderKind::Escapes)]);
        assert_eq!(
            differences(&old, &new),
            [
                "added: NV_ESC_OTHER Escape(217)",
                "renumbered: NV_ESC_RM_THIRD Escape(42), now Escape(43)",
                "removed: NV_ESC_SECOND Escape(217)",
            ]
        );
        assert!(differences(&old, &old).is_empty());
    }

    #[test]
    fn branch_without_a_list_is_compared_with_the_one_before_it() {
        assert_eq!(nearest(580).map(|(branch, _)| branch), Some(580));
        assert_eq!(nearest(585).map(|(branch, _)| branch), Some(580));
        assert_eq!(nearest(100), None);
    }
}
