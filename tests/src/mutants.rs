//! Mutants of PTX, on which the vendor's assembler and that of the software GPU should agree: is the text valid?
//!
//! A mutant is one kernel of the corpus with one change. Its number decides the kernel and the change, so a difference can be made
//! again.

use std::collections::BTreeSet;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};

use crate::paths;

/// Both assemblers only check: that is the same grammar, and takes a fraction of the time.
const ARCHITECTURE: &str = "-arch=compute_80";
const TYPES: [&str; 19] = [
    "b8", "b16", "b32", "b64", "b128", "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f16", "f16x2",
    "bf16", "f32", "f64", "pred",
];
const MODIFIERS: [&str; 44] = [
    "rn", "rz", "rm", "rp", "sat", "ftz", "approx", "wide", "lo", "hi", "global", "shared", "local", "const",
    "param", "v2", "v4", "sync", "aligned", "volatile", "relaxed", "acquire", "release", "gpu", "cta", "sys",
    "cc", "uni", "full", "to", "eq", "ne", "lt", "gtu", "ltu", "and", "or", "xor", "add", "min", "max",
    "exch", "cas", "x",
];
const NUMBERS: [&str; 12] = [
    "0",
    "1",
    "-1",
    "31",
    "32",
    "64",
    "4294967296",
    "-2147483649",
    "0f3F800000",
    "0d3FF0000000000000",
    "1.5",
    "18446744073709551616",
];
const SIGNS: &[u8] = b".,;%[]{}@!+-x0_ ";

/// A kernel with everything of its module but the other kernels.
#[derive(Debug)]
struct KernelText {
    before: String,
    kernel: Vec<String>,
    after: String,
}

/// The kernels of the engine's tests.
#[derive(Debug)]
pub struct Corpus {
    units: Vec<KernelText>,
    /// All opcodes in them.
    opcodes: Vec<String>,
}

impl Corpus {
    /// Reads the kernels.
    ///
    /// # Errors
    /// The files cannot be read, or have no kernels.
    pub fn read() -> Result<Self> {
        let folder = paths::workspace().join("softgpu/engine/tests/data");
        let mut files: Vec<PathBuf> = fs::read_dir(&folder)
            .with_context(|| format!("reading {}", folder.display()))?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<Result<_, _>>()?;
        files.retain(|file| file.extension().is_some_and(|end| end == "ptx"));
        files.sort();
        let mut units = Vec::new();
        for file in files {
            units.extend(split(&fs::read_to_string(&file).with_context(|| format!("{}", file.display()))?));
        }
        ensure!(!units.is_empty(), "{} has no kernels", folder.display());
        let lines = units.iter().flat_map(|unit| &unit.kernel);
        let opcodes: BTreeSet<String> = lines.filter_map(|line| Some(opcode(line)?.1.to_owned())).collect();
        Ok(Self { units, opcodes: opcodes.into_iter().collect() })
    }

    /// The mutant of a number.
    #[must_use]
    pub fn mutant(&self, number: u64) -> String {
        let mut dice = Dice(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        loop {
            let unit = dice.pick(&self.units);
            let mut kernel = unit.kernel.clone();
            if self.change(&mut dice, &mut kernel).is_some() {
                return format!("{}{}\n{}", unit.before, kernel.join("\n"), unit.after);
            }
        }
    }

    /// Makes one change; `None` if the chosen line does not have what it is about.
    fn change(&self, dice: &mut Dice, kernel: &mut Vec<String>) -> Option<()> {
        let kind = dice.below(12);
        let at = dice.below(kernel.len());
        let line = kernel[at].clone();
        let parts = tokens(&line);
        let is_modifier = |token: &Range<usize>| line[token.clone()].starts_with('.');
        let modifiers: Vec<_> = parts.iter().filter(|token| is_modifier(token)).cloned().collect();
        let words = |line: &String| -> Vec<String> {
            tokens(line).into_iter().map(|token| line[token].to_owned()).collect()
        };
        let registers_of: BTreeSet<String> =
            kernel.iter().flat_map(words).filter(|word| word.starts_with('%')).collect();
        let mut replace = |token: Range<usize>, by: &str| {
            kernel[at] = format!("{}{by}{}", &line[..token.start], &line[token.end..]);
        };
        match kind {
            0 => replace(dice.of(&parts)?, ""),
            1 => {
                let token = dice.of(&parts)?;
                replace(token.end..token.end, &format!(" {}", &line[token]));
            }
            2 => {
                let is_type = |token: &Range<usize>| TYPES.contains(&&line[token.start + 1..token.end]);
                let types: Vec<_> = modifiers.into_iter().filter(is_type).collect();
                replace(dice.of(&types)?, &format!(".{}", dice.pick(&TYPES)));
            }
            3 => replace(dice.of(&modifiers)?, ""),
            4 => {
                let token = dice.of(&modifiers)?;
                let word = if dice.below(3) == 0 { dice.pick(&TYPES) } else { dice.pick(&MODIFIERS) };
                let end = if dice.below(2) == 0 { token.start } else { token.end };
                replace(token.start..end, &format!(".{word}"));
            }
            5 => {
                let (place, _) = opcode(&line)?;
                let other = dice.pick(&self.opcodes);
                replace(place, other);
            }
            6 => {
                let registers: Vec<_> =
                    parts.iter().filter(|token| line[token.start..].starts_with('%')).cloned().collect();
                let token = dice.of(&registers)?;
                let all: Vec<String> = registers_of.into_iter().collect();
                let other = dice.pick(&all);
                replace(token, other);
            }
            7 => {
                let is_number = |token: &&Range<usize>| {
                    line[token.start..]
                        .trim_start_matches('-')
                        .starts_with(|sign: char| sign.is_ascii_digit())
                };
                let numbers: Vec<_> = parts.iter().filter(is_number).cloned().collect();
                let (number, other) = (dice.of(&numbers)?, dice.pick(&NUMBERS));
                replace(number, other);
            }
            8 => {
                kernel.remove(at);
            }
            9 => kernel.insert(at, line.clone()),
            10 => {
                let (first, second) = (dice.of(&parts)?, dice.of(&parts)?);
                let (first, second) =
                    if first.start <= second.start { (first, second) } else { (second, first) };
                if first.end > second.start {
                    return None;
                }
                let between = &line[first.end..second.start];
                let swapped = format!("{}{between}{}", &line[second.clone()], &line[first.clone()]);
                replace(first.start..second.end, &swapped);
            }
            _ => {
                let place = dice.below(line.len().max(1));
                let sign = char::from(*dice.pick(SIGNS));
                line.is_char_boundary(place + 1).then_some(())?;
                replace(place..place + 1, &sign.to_string());
            }
        }
        Some(())
    }
}

/// Splits a module: one unit for each kernel.
fn split(text: &str) -> Vec<KernelText> {
    let lines: Vec<&str> = text.lines().collect();
    let mut kernels: Vec<Range<usize>> = Vec::new();
    let mut at = 0;
    while at < lines.len() {
        if lines[at].contains(".entry ") {
            let length = lines[at..].iter().position(|line| line.starts_with('}'));
            let end = length.map_or(lines.len(), |length| at + length + 1);
            kernels.push(at..end);
            at = end;
        } else {
            at += 1;
        }
    }
    let others = |range: Range<usize>| {
        let kept = range.filter(|line| !kernels.iter().any(|kernel| kernel.contains(line)));
        kept.map(|line| format!("{}\n", lines[line])).collect::<String>()
    };
    let unit = |kernel: &Range<usize>| KernelText {
        before: others(0..kernel.start),
        kernel: lines[kernel.clone()].iter().map(|line| (*line).to_owned()).collect(),
        after: others(kernel.end..lines.len()),
    };
    kernels.iter().map(unit).collect()
}

/// The opcode of a line with an instruction, and its place.
fn opcode(line: &str) -> Option<(Range<usize>, &str)> {
    let mut rest = line.trim_start();
    if let Some(guarded) = rest.strip_prefix('@') {
        rest = guarded.split_once([' ', '\t'])?.1.trim_start();
    }
    let length = rest.find(|sign: char| !sign.is_ascii_lowercase() && !sign.is_ascii_digit())?;
    let is_opcode = length > 0 && rest.ends_with(';') && rest[length..].starts_with(['.', ' ', '\t', ';']);
    let start = line.len() - rest.len();
    is_opcode.then(|| (start..start + length, &rest[..length]))
}

/// The tokens of a line.
fn tokens(line: &str) -> Vec<Range<usize>> {
    let bytes = line.as_bytes();
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || b"_$:".contains(&byte);
    let mut found = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let start = at;
        at += 1;
        if bytes[start].is_ascii_whitespace() || !bytes[start].is_ascii() {
            continue;
        }
        if is_word(bytes[start]) || b".%-".contains(&bytes[start]) {
            while at < bytes.len() && is_word(bytes[at]) {
                at += 1;
            }
        }
        found.push(start..at);
    }
    found
}

/// Random numbers that a number decides.
struct Dice(u64);

impl Dice {
    fn below(&mut self, count: usize) -> usize {
        // Xorshift; the low bits are the weakest.
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap_or(0) % count.max(1)
    }

    fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }

    fn of(&mut self, list: &[Range<usize>]) -> Option<Range<usize>> {
        list.get(self.below(list.len())).cloned()
    }
}

/// A mutant on which the assemblers disagree.
#[derive(Debug)]
pub struct Difference {
    /// The number of the mutant.
    pub number: u64,
    /// First lines of the assemblers' messages: the vendor's, and ours. The one that accepts the text may have none.
    pub messages: [String; 2],
    /// True if the vendor's assembler accepts the text.
    pub valid: bool,
}

/// The result of a comparison.
#[derive(Debug, Default)]
pub struct Comparison {
    /// Number of mutants.
    pub count: u64,
    /// Number of those that the vendor's assembler accepts.
    pub valid: u64,
    /// Those on which the verdicts differ, by their numbers.
    pub differences: Vec<Difference>,
}

impl Comparison {
    /// The part of mutants with the same verdict.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "numbers of mutants are small")]
    pub fn agreement(&self) -> f64 {
        1.0 - self.differences.len() as f64 / self.count.max(1) as f64
    }
}

/// Lets the vendor's assembler and ours check the mutants of these numbers.
///
/// # Errors
/// An assembler cannot be started, or a file cannot be written.
pub fn compare(vendor: &Path, ours: &Path, numbers: Range<u64>) -> Result<Comparison> {
    let corpus = Corpus::read()?;
    let folder = tempfile::tempdir().context("a folder for mutants")?;
    let next = AtomicU64::new(numbers.start);
    let whole = Mutex::new(Comparison::default());
    let work = |worker: usize| -> Result<()> {
        let file = folder.path().join(format!("{worker}.ptx"));
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= numbers.end {
                return Ok(());
            }
            fs::write(&file, corpus.mutant(number)).context("writing a mutant")?;
            let ((valid, theirs), (accepted, message)) = (verdict(vendor, &file)?, verdict(ours, &file)?);
            let mut whole = whole.lock().unwrap_or_else(PoisonError::into_inner);
            whole.count += 1;
            whole.valid += u64::from(valid);
            if valid != accepted {
                whole.differences.push(Difference { number, messages: [theirs, message], valid });
            }
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let started: Vec<_> = (0..workers).map(|worker| scope.spawn(move || work(worker))).collect();
        started.into_iter().try_for_each(|worker| worker.join().expect("a worker does not panic"))
    })?;
    let mut whole = whole.into_inner().unwrap_or_else(PoisonError::into_inner);
    whole.differences.sort_by_key(|difference| difference.number);
    Ok(whole)
}

/// Whether an assembler accepts a file, and the first line of its messages.
fn verdict(assembler: &Path, file: &Path) -> Result<(bool, String)> {
    let output = Command::new(assembler)
        .args([Path::new(ARCHITECTURE), file])
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("starting {}", assembler.display()))?;
    let code = output.status.code();
    ensure!(matches!(code, Some(0 | 255)), "{} ended with {}", assembler.display(), output.status);
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().next().unwrap_or("");
    let message = line.split_once("; ").map_or(line, |(_, message)| message);
    Ok((code == Some(0), message.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_decides_its_mutant_and_most_mutants_differ() {
        let corpus = Corpus::read().unwrap();
        let again = Corpus::read().unwrap();
        let mutants: BTreeSet<String> = (0..200).map(|number| corpus.mutant(number)).collect();
        assert!(mutants.len() > 190, "{}", mutants.len());
        assert!((0..200).all(|number| corpus.mutant(number) == again.mutant(number)));
    }

    #[test]
    fn units_have_one_kernel_and_the_rest_of_their_module() {
        let text = ".version 8.0\n.global .u32 g;\n.visible .entry a()\n{\nret;\n}\n.func f()\n{\nret;\n}\n.entry b()\n{\nret;\n}\n";
        let units = split(text);
        assert_eq!(units.len(), 2);
        assert!(units[1].before.contains(".func f") && !units[1].before.contains(".entry a"));
        assert!(units[0].after.contains(".func f") && !units[0].after.contains(".entry b"));
        assert_eq!(units[0].kernel.len(), 4);
    }

    #[test]
    fn tokens_and_opcodes_are_found() {
        let line = "\t@%p1 ld.global.v2.f32 \t{%f1, %f2}, [%rd1+-8];";
        let found: Vec<&str> = tokens(line).into_iter().map(|token| &line[token]).collect();
        assert!(found.contains(&".global") && found.contains(&"%f2") && found.contains(&"-8"), "{found:?}");
        assert_eq!(opcode(line).map(|(_, opcode)| opcode), Some("ld"));
        assert_eq!(opcode("$L__BB0_1:"), None);
        assert_eq!(opcode("\t.reg .b32 \t%r<4>;"), None);
    }
}
