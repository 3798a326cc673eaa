//! The phases and their steps, in order of worth.

use anyhow::{Result, bail};

use crate::step::Question;
use crate::{bench, custody, frameworks, programs, questions, time};

/// Name of the hidden step that fills the header.
pub(crate) const HEADER: &str = questions::header::NAME;

/// A group of steps.
#[derive(Debug)]
pub(crate) struct Phase {
    /// Name for `--phase`.
    pub(crate) name: &'static str,
    /// Its purpose.
    about: &'static str,
    /// Its limit in minutes, so that a phase that hangs leaves time for the others. Steps after it are not started.
    pub(crate) minutes: u32,
    /// Its steps by subject.
    subjects: &'static [&'static [Question]],
    /// Names of the steps that a short run leaves out.
    pub(crate) long: &'static [&'static str],
    /// True if its steps have a folder for temporary files.
    pub(crate) has_folder: bool,
    /// True if its steps are rows of a table in `docs/hardware-results.md`.
    in_table: bool,
    /// True if it runs only by its name.
    hidden: bool,
}

impl Phase {
    /// The steps.
    pub(crate) fn questions(&self) -> impl Iterator<Item = &'static Question> + use<> {
        self.subjects.iter().copied().flatten()
    }
}

/// All phases, in order of worth.
const ALL: &[Phase] = &[
    Phase {
        name: "questions",
        about: "The open questions of the design, each a small program.",
        minutes: 5,
        subjects: questions::ALL,
        long: &[],
        has_folder: false,
        in_table: true,
        hidden: false,
    },
    Phase {
        name: programs::PHASE,
        about: "Each CUDA program of the bundle, natively and through Sluice.",
        minutes: 6,
        subjects: &[programs::QUESTIONS],
        long: &[],
        has_folder: true,
        in_table: false,
        hidden: false,
    },
    Phase {
        name: custody::PHASE,
        about: "Attacks on the custody of device memory, beside a VM that searches or computes.",
        minutes: 12,
        subjects: custody::SUBJECTS,
        long: custody::LONG,
        has_folder: true,
        in_table: true,
        hidden: false,
    },
    Phase {
        name: time::PHASE,
        about: "Shares, caps and latency of programs that compute beside each other, native and through Sluice.",
        minutes: 5,
        subjects: &[time::QUESTIONS],
        long: time::LONG,
        has_folder: true,
        in_table: true,
        hidden: false,
    },
    Phase {
        name: bench::PHASE,
        about: "Calls, launches, copies, allocations and starts, native and through Sluice in turns.",
        minutes: 4,
        subjects: &[bench::QUESTIONS],
        long: &[],
        has_folder: true,
        in_table: true,
        hidden: false,
    },
    Phase {
        name: frameworks::PHASE,
        about: "Clients in Python: PyTorch, Triton, JAX, CuPy, numba and cuda-python, where they are installed.",
        minutes: 15,
        subjects: &[frameworks::QUESTIONS],
        long: &[],
        has_folder: true,
        in_table: false,
        hidden: false,
    },
    Phase {
        name: "self-test-disk",
        about: "A step that fills its disk, for a test of the frame.",
        minutes: 1,
        subjects: &[questions::self_test::WITH_FOLDER],
        long: &[],
        has_folder: true,
        in_table: false,
        hidden: true,
    },
    Phase {
        name: "self-test",
        about: "Steps that end badly, for tests of the frame.",
        minutes: 5,
        subjects: &[questions::self_test::QUESTIONS],
        long: &[],
        has_folder: false,
        in_table: false,
        hidden: true,
    },
];

/// The phases of these names, in order of worth; without names all that are not hidden.
pub(crate) fn select(names: &[String]) -> Result<Vec<&'static Phase>> {
    for name in names {
        if !ALL.iter().any(|phase| phase.name == name) {
            bail!("no phase is named {name}: see `sluice-hardware list`");
        }
    }
    let chosen = |phase: &&Phase| match names {
        [] => !phase.hidden,
        names => names.iter().any(|name| name == phase.name),
    };
    Ok(ALL.iter().filter(chosen).collect())
}

/// The step of this name.
pub(crate) fn find(name: &str) -> Option<&'static Question> {
    let hidden = questions::header::QUESTIONS.iter();
    ALL.iter().flat_map(Phase::questions).chain(hidden).find(|question| question.name == name)
}

/// The head of a table in `docs/hardware-results.md`.
const HEAD: &str = "| step | question | expected | consequence |\n|---|---|---|---|";

/// A row of the table in `docs/hardware-results.md`.
fn row(question: &Question) -> String {
    let Question { name, question, expected, consequence, .. } = question;
    format!("| `{name}` | {question} | {expected} | {consequence} |")
}

/// Prints the phases and steps, for people or as rows of a table.
pub(crate) fn list(table: bool) {
    if table {
        for phase in ALL.iter().filter(|phase| phase.in_table) {
            println!("\n### {}\n\n{}\n\n{HEAD}", phase.name, phase.about);
            phase.questions().for_each(|question| println!("{}", row(question)));
        }
        return;
    }
    for phase in ALL.iter().filter(|phase| !phase.hidden) {
        println!("{}: {} At most {} minutes.", phase.name, phase.about, phase.minutes);
        for question in phase.questions() {
            println!("  {:<28} {:3} s  {}", question.name, question.seconds, question.question);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_steps_are_unique_and_texts_are_complete() {
        let questions: Vec<_> = ALL.iter().flat_map(Phase::questions).collect();
        for (index, question) in questions.iter().enumerate() {
            assert!(
                questions.iter().skip(index + 1).all(|other| other.name != question.name),
                "{}",
                question.name
            );
            for text in [question.question, question.expected, question.consequence] {
                assert!(text.ends_with(['.', '?']), "{}: {text}", question.name);
            }
            assert!(question.seconds > 0, "{}", question.name);
        }
        for phase in ALL {
            for name in phase.long {
                assert!(phase.questions().any(|question| question.name == *name), "{name}");
            }
        }
    }

    #[test]
    fn page_has_every_phase_and_question() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/hardware-results.md");
        let page = std::fs::read_to_string(page).unwrap();
        for phase in ALL.iter().filter(|phase| !phase.hidden) {
            let (begin, end) = (
                format!("| `{}` | {} |", phase.name, phase.questions().count()),
                format!("| {} min |", phase.minutes),
            );
            let has = page.lines().any(|line| line.starts_with(&begin) && line.ends_with(&end));
            assert!(has, "the table of phases has no row {begin} … {end}");
        }
        for question in ALL.iter().filter(|phase| phase.in_table).flat_map(Phase::questions) {
            let row = row(question);
            assert!(
                page.lines().any(|line| line == row),
                "replace the table by `sluice-hardware list --table`: {row}"
            );
        }
    }
}
