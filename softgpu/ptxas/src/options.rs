//! The command line of the vendor's assembler, of CUDA 13.5. AssemblerOptions that tune machine code have no effect.

use std::fmt::Write as _;
use std::fs;

use softgpu_engine::NEWEST_ISA;

/// Architectures of the vendor's assembler, times ten.
const ARCHITECTURES: [u32; 13] = [75, 80, 86, 87, 88, 89, 90, 100, 103, 107, 110, 120, 121];
/// The first architecture with a variant of its own, and the first with a variant of a family.
const FIRST_OWN: u32 = 90;
const FIRST_FAMILY: u32 = 100;
/// Files of options that name each other may not do so forever.
const FILES: usize = 16;

/// An option with a value, or a switch. The long form follows two dashes, the short one follows one.
struct OptionForm {
    long: &'static str,
    short: &'static str,
    takes_value: bool,
}

const fn switch(long: &'static str, short: &'static str) -> OptionForm {
    OptionForm { long, short, takes_value: false }
}

const fn value(long: &'static str, short: &'static str) -> OptionForm {
    OptionForm { long, short, takes_value: true }
}

const FORMS: &[OptionForm] = &[
    value("Ofast-compile", "Ofc"),
    value("allow-expensive-optimizations", "allow-expensive-optimizations"),
    value("apply-controls", "apply-controls"),
    switch("compile-as-tools-patch", "astoolspatch"),
    switch("compile-only", "c"),
    switch("compiler-annotations", "annotate"),
    value("def-load-cache", "dlcm"),
    value("def-store-cache", "dscm"),
    switch("device-debug", "g"),
    value("device-function-maxrregcount", "func-maxrregcount"),
    value("device-stack-protector", "device-stack-protector"),
    switch("disable-optimizer-constants", "disable-optimizer-consts"),
    switch("disable-warnings", "w"),
    switch("dont-merge-basicblocks", "no-bb-merge"),
    value("enable-func-clone-sc", "enable-func-clone-sc"),
    value("entry", "e"),
    switch("extensible-whole-program", "ewp"),
    value("fmad", "fmad"),
    value("force-load-cache", "flcm"),
    value("force-store-cache", "fscm"),
    switch("g-tensor-memory-access-check", "g-tmem-access-check"),
    switch("generate-line-info", "lineinfo"),
    switch("gno-fabric-access-check", "gno-fabric-access-check"),
    switch("gno-tensor-memory-access-check", "gno-tmem-access-check"),
    value("gpu-name", "arch"),
    switch("help", "h"),
    switch("input-as-string", "ias"),
    switch("jobserver", "jobserver"),
    switch("legacy-bar-warp-wide-behavior", "legacy-bar-warp-wide-behavior"),
    switch("list-arch", "arch-ls"),
    switch("list-version", "version-ls"),
    value("machine", "m"),
    switch("make-errors-visible-at-exit", "make-errors-visible-at-exit"),
    value("maxntid", "maxntid"),
    value("maxrregcount", "maxrregcount"),
    value("minnctapersm", "minnctapersm"),
    value("opt-level", "O"),
    switch("optimize-float-atomics", "opt-fp-atomics"),
    value("options-file", "optf"),
    value("output-file", "o"),
    switch("override-directive-values", "override-directive-values"),
    value("position-independent-code", "pic"),
    switch("preserve-relocs", "preserve-relocs"),
    value("register-usage-level", "regUsageLevel"),
    switch("return-at-end", "ret-end"),
    value("sanitize", "sanitize"),
    switch("sp-bounds-check", "sp-bounds-check"),
    value("split-compile", "split-compile"),
    switch(
        "suppress-async-bulk-multicast-advisory-warning",
        "suppress-async-bulk-multicast-advisory-warning",
    ),
    switch("suppress-debug-info", "suppress-debug-info"),
    switch("suppress-double-demote-warning", "suppress-double-demote-warning"),
    switch("suppress-position-independent-code-warning", "suppress-position-independent-code-warning"),
    switch("suppress-sparse-mma-advisory-info", "suppress-sparse-mma-advisory-info"),
    switch("suppress-stack-size-warning", "suppress-stack-size-warning"),
    switch("verbose", "v"),
    switch("verbose2", "v2"),
    switch("version", "V"),
    switch("warn-on-double-precision-use", "warn-double-usage"),
    switch("warn-on-local-memory-usage", "warn-lmem-usage"),
    switch("warn-on-spills", "warn-spills"),
    switch("warning-as-error", "Werror"),
];

/// The architecture to assemble for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Architecture {
    /// The name as given, for instance `sm_90a`.
    pub(crate) name: String,
    /// The architecture, times ten.
    pub(crate) sm: u32,
    /// True if there is no code to write: the architecture is that of a text, or of a later link.
    pub(crate) check_only: bool,
}

impl Architecture {
    fn parse(name: &str) -> Option<Self> {
        let (kind, number) = name.split_once('_')?;
        let digits = number.trim_end_matches(['a', 'f']);
        let sm = digits.parse().ok().filter(|sm| ARCHITECTURES.contains(sm))?;
        let fits = match &number[digits.len()..] {
            "" => true,
            "a" => sm >= FIRST_OWN,
            "f" => sm >= FIRST_FAMILY,
            _ => false,
        };
        let known = fits && matches!(kind, "sm" | "compute" | "lto");
        known.then(|| Self { name: name.to_owned(), sm, check_only: kind != "sm" })
    }
}

/// The options that matter here.
#[derive(Debug)]
pub(crate) struct AssemblerOptions {
    pub(crate) architecture: Architecture,
    /// Paths, or texts if `inputs_are_texts`.
    pub(crate) inputs: Vec<String>,
    pub(crate) inputs_are_texts: bool,
    pub(crate) output: String,
    /// Kernels that must exist.
    pub(crate) entries: Vec<String>,
    pub(crate) max_registers: Option<u32>,
    /// True if names may stay undefined, for a later link.
    pub(crate) relocatable: bool,
    pub(crate) verbose: bool,
    pub(crate) warnings: bool,
    pub(crate) warnings_are_errors: bool,
}

/// The task of one start of the program.
#[derive(Debug)]
pub(crate) enum AssemblerRequest {
    /// Prints a text.
    Print(String),
    /// Assembles.
    Assemble(AssemblerOptions),
}

impl AssemblerRequest {
    /// Parses the command line. The message of an error is that of the vendor's program.
    pub(crate) fn parse(words: Vec<String>) -> Result<Self, String> {
        let mut options = AssemblerOptions {
            // The vendor's default.
            architecture: Architecture { name: "sm_75".to_owned(), sm: 75, check_only: false },
            inputs: Vec::new(),
            inputs_are_texts: false,
            output: "elf.o".to_owned(),
            entries: Vec::new(),
            max_registers: None,
            relocatable: false,
            verbose: false,
            warnings: true,
            warnings_are_errors: false,
        };
        // The next word is the last one.
        let mut words: Vec<String> = words.into_iter().rev().collect();
        let mut files = 0;
        while let Some(word) = words.pop() {
            let Some((name, attached)) = option(&word)? else {
                options.inputs.push(word);
                continue;
            };
            let mut text = || {
                let value = attached.map(str::to_owned).or_else(|| words.pop());
                value.ok_or_else(|| format!("Value expected for option '{name}'"))
            };
            match name {
                "help" => return Ok(Self::Print(help())),
                "version" => return Ok(Self::Print(version())),
                "list-arch" => return Ok(Self::Print(lines(ARCHITECTURES.iter()))),
                "list-version" => {
                    return Ok(Self::Print(format!("{}.{}\n", NEWEST_ISA / 10, NEWEST_ISA % 10)));
                }
                "output-file" => options.output = text()?,
                "gpu-name" => {
                    let name = text()?;
                    options.architecture = Architecture::parse(&name)
                        .ok_or_else(|| format!("Value '{name}' is not defined for option 'gpu-name'"))?;
                }
                "entry" => options.entries.extend(text()?.split(',').map(str::to_owned)),
                "maxrregcount" => options.max_registers = registers(&text()?)?,
                "opt-level" => {
                    let level = text()?;
                    if level.parse::<u32>().is_err() {
                        return Err(format!("'{level}': expected a number for option 'opt-level'"));
                    }
                }
                "options-file" => {
                    files += 1;
                    let path = text()?;
                    let content = fs::read_to_string(&path).ok().filter(|_| files <= FILES);
                    let content = content.ok_or_else(|| format!("Could not open options file '{path}'"))?;
                    words.extend(content.split_whitespace().rev().map(str::to_owned));
                }
                "input-as-string" => options.inputs_are_texts = true,
                "compile-only" | "extensible-whole-program" => options.relocatable = true,
                "verbose" | "verbose2" => options.verbose = true,
                "disable-warnings" => options.warnings = false,
                "warning-as-error" => options.warnings_are_errors = true,
                _ if FORMS.iter().any(|form| form.long == name && form.takes_value) => drop(text()?),
                _ => {}
            }
        }
        if options.inputs.is_empty() {
            return Ok(Self::Print(help()));
        }
        Ok(Self::Assemble(options))
    }
}

/// The long name of the option that a word is, and the value in it; `None` for an input.
fn option(word: &str) -> Result<Option<(&'static str, Option<&str>)>, String> {
    let Some(rest) = word.strip_prefix('-').filter(|rest| !rest.is_empty()) else { return Ok(None) };
    let (name, attached) = match rest.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (rest, None),
    };
    let found = match name.strip_prefix('-') {
        Some(long) => FORMS.iter().find(|form| form.long == long),
        None => FORMS.iter().find(|form| form.short == name),
    };
    if let Some(OptionForm { long, takes_value, .. }) = found {
        return match attached {
            Some(_) if !takes_value => Err(format!("Option '{long}' takes no value")),
            attached => Ok(Some((*long, attached))),
        };
    }
    // A number may follow a short option at once.
    match rest.strip_prefix('O') {
        Some(level) if level.parse::<u32>().is_ok() => Ok(Some(("opt-level", Some(level)))),
        _ => Err(format!("Unknown option '{}'", rest.trim_start_matches('-'))),
    }
}

fn registers(text: &str) -> Result<Option<u32>, String> {
    match text {
        "archmax" | "archmin" => Ok(None),
        number => match number.parse() {
            Ok(count) => Ok(Some(count).filter(|count| *count > 0)),
            Err(_) => Err(format!("'{number}': expected a number for option 'maxrregcount'")),
        },
    }
}

fn lines<T: std::fmt::Display>(items: impl Iterator<Item = T>) -> String {
    items.map(|item| format!("{item}\n")).collect()
}

/// The version of CUDA whose assembler reads the newest PTX that the engine reads: `9.5` came with `13.5`.
fn version() -> String {
    let (major, minor) = (NEWEST_ISA / 10 + 4, NEWEST_ISA % 10);
    format!(
        "ptxas: assembler of the Sluice software GPU {}, in place of NVIDIA (R) Ptx optimizing assembler\n\
         Cuda compilation tools, release {major}.{minor}, V{major}.{minor}.0\n",
        env!("CARGO_PKG_VERSION")
    )
}

fn help() -> String {
    let mut text = "\nUsage  : ptxas [options] <ptx file>,...\n\n\
        Checks PTX, and writes a file for the driver of the Sluice software GPU that holds it.\n\n\
        Options\n=======\n\n"
        .to_owned();
    for OptionForm { long, short, takes_value } in FORMS {
        let long = format!("--{long}{}", if *takes_value { " <value>" } else { "" });
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{long:<52}(-{short})");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<AssemblerRequest, String> {
        AssemblerRequest::parse(line.split_whitespace().map(str::to_owned).collect())
    }

    fn options(line: &str) -> AssemblerOptions {
        match parse(line) {
            Ok(AssemblerRequest::Assemble(options)) => options,
            other => panic!("{line}: {other:?}"),
        }
    }

    // Promise: S85
    #[test]
    fn command_lines_of_triton_and_of_xla_are_understood() {
        let of_triton =
            "-lineinfo -suppress-debug-info --fmad=false -v --opt-level 0 --gpu-name=sm_90a in.ptx -o out";
        let AssemblerOptions { architecture, inputs, output, verbose, .. } = options(of_triton);
        assert_eq!((architecture.sm, architecture.check_only, verbose), (90, false, true));
        assert_eq!((inputs, output), (vec!["in.ptx".to_owned()], "out".to_owned()));
        let of_xla = "/tmp/a.ptx -o /tmp/a.cubin -arch=sm_80 --warn-on-spills -v -O2 -c -maxrregcount 64";
        let AssemblerOptions { architecture, max_registers, relocatable, output, .. } = options(of_xla);
        assert_eq!((architecture.name.as_str(), max_registers, relocatable), ("sm_80", Some(64), true));
        assert_eq!(output, "/tmp/a.cubin");
    }

    #[test]
    fn wrong_options_are_errors_that_name_them() {
        for (line, named) in [
            ("-foo a", "Unknown option 'foo'"),
            ("-arch=sm_99 a", "'sm_99'"),
            ("-arch=sm_80a a", "'sm_80a'"),
            ("-arch sm_90f a", "'sm_90f'"),
            ("a -o", "output-file"),
            ("--verbose=1 a", "verbose"),
            ("-O=x a", "'x'"),
            ("-maxrregcount many a", "'many'"),
            ("-optf /nowhere/file a", "/nowhere/file"),
        ] {
            let message = parse(line).map(drop).unwrap_err();
            assert!(message.contains(named), "{line}: {message}");
        }
        for known in ["sm_75", "sm_90a", "sm_100f", "sm_120a", "compute_80", "lto_90"] {
            assert!(Architecture::parse(known).is_some(), "{known}");
        }
    }

    // Promise: S85
    #[test]
    fn version_has_the_words_that_callers_look_for() {
        let Ok(AssemblerRequest::Print(text)) = parse("--version") else { panic!("no version") };
        assert!(text.contains("release 13.5, V13.5.0"), "{text}");
    }

    #[test]
    fn options_in_a_file_count_in_their_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("options");
        fs::write(&path, "-arch=sm_89\n-v").unwrap();
        let AssemblerOptions { architecture, verbose, .. } = options(&format!("-optf {} a", path.display()));
        assert_eq!((architecture.sm, verbose), (89, true));
        fs::write(&path, format!("-optf {}", path.display())).unwrap();
        assert!(parse(&format!("-optf {} a", path.display())).is_err(), "a file that names itself");
    }
}
