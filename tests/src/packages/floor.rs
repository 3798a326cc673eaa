//! The glibc that a program or library needs: the newest of the versions of its symbols.

use std::fmt;
use std::fs;
use std::path::Path;
use std::str::FromStr;

use anyhow::{Context as _, Result};
use object::elf::FileHeader64;
use object::read::elf::{FileHeader as _, SectionHeader as _};
use object::{Endianness, StringTable};

/// The first two numbers of a version.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32);

impl fmt::Display for Version {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{}.{}", self.0, self.1)
    }
}

impl FromStr for Version {
    type Err = ();

    /// Reads `2.28`, and `2.2.5` without its last number.
    fn from_str(text: &str) -> Result<Self, ()> {
        let mut numbers = text.split('.').map(|number| number.parse().map_err(|_| ()));
        Ok(Self(numbers.next().ok_or(())??, numbers.next().ok_or(())??))
    }
}

/// The glibc version that a file needs; 0.0 if it needs none.
///
/// # Errors
/// When it is no program or library of a 64-bit Linux.
pub fn needed(file: &Path) -> Result<Version> {
    let data = fs::read(file).with_context(|| format!("reading {}", file.display()))?;
    let names = versions(&data).with_context(|| format!("cannot parse {}", file.display()))?;
    Ok(names.iter().filter_map(|name| name.strip_prefix("GLIBC_")?.parse().ok()).max().unwrap_or_default())
}

/// Names of all versions of required symbols.
fn versions(data: &[u8]) -> Result<Vec<String>> {
    let header = FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, data)?;
    let Some((mut libraries, link)) = sections.gnu_verneed(endian, data)? else { return Ok(Vec::new()) };
    let strings: StringTable<'_> = sections.section(link)?.strings(endian, data)?.unwrap_or_default();
    let mut names = Vec::new();
    while let Some((_, mut wanted)) = libraries.next()? {
        while let Some(version) = wanted.next()? {
            names.push(String::from_utf8_lossy(version.name(endian, strings)?).into_owned());
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        let version = |text: &str| text.parse::<Version>();
        assert!(version("2.9").unwrap() < version("2.28").unwrap());
        assert_eq!(version("2.2.5"), Ok(Version(2, 2)));
        assert_eq!((version("PRIVATE"), version("2")), (Err(()), Err(())));
    }

    #[test]
    fn needed_glibc_of_this_program_is_plausible() {
        let own = needed(&std::env::current_exe().unwrap()).unwrap();
        assert!(Version(2, 2) < own && own < Version(2, 99), "{own}");
        assert!(needed(Path::new("/etc/passwd")).is_err());
    }
}
