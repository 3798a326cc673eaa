//! The check of the texts, and the file that is written.

use std::fs;

use softgpu_cuda::linked::{self, LinkedText};
use softgpu_engine::{Kernel, LoadError, Module, SourceUnit};

use crate::options::AssemblerOptions;

/// A message that ends the program.
pub(crate) fn fatal(message: &str) -> String {
    format!("ptxas fatal   : {message}")
}

/// Assembles; an error is the lines to print.
pub(crate) fn assemble(options: &AssemblerOptions) -> Result<(), Vec<String>> {
    let mut texts = Vec::new();
    for input in &options.inputs {
        let text = if options.inputs_are_texts {
            input.clone().into_bytes()
        } else {
            let unreadable = || format!("Input file '{input}' could not be opened");
            fs::read(input).map_err(|_| aborted(vec![fatal(&unreadable())]))?
        };
        texts.push(LinkedText { text, max_registers: options.max_registers });
    }
    let at_line = |unit: usize, error: &LoadError| {
        let name = match options.inputs.get(unit) {
            Some(path) if !options.inputs_are_texts => path,
            _ => "<string>",
        };
        format!("ptxas {name}, line {}; error   : {}", error.line, error.message)
    };
    let mut variables = 0;
    if options.relocatable {
        for (unit, LinkedText { text, .. }) in texts.iter().enumerate() {
            Module::check(text, options.architecture.sm)
                .map_err(|error| aborted(vec![at_line(unit, &error)]))?;
        }
    } else {
        let units: Vec<SourceUnit<'_>> = texts
            .iter()
            .map(|LinkedText { text, max_registers }| SourceUnit { text, max_registers: *max_registers })
            .collect();
        let module = Module::load_units(&units, options.architecture.sm)
            .map_err(|(unit, error)| aborted(vec![at_line(unit, &error)]))?;
        report(options, &module)?;
        let sizes = module.globals().iter().map(|global| global.size);
        variables = sizes.fold(0, u64::saturating_add);
    }
    if options.architecture.check_only {
        return Ok(());
    }
    fs::write(&options.output, linked::encode(&texts, variables))
        .map_err(|_| vec![fatal(&format!("Output file '{}' could not be opened", options.output))])
}

/// Adds the last line of a failed run.
fn aborted(mut lines: Vec<String>) -> Vec<String> {
    lines.push(fatal("Ptx assembly aborted due to errors"));
    lines
}

/// Prints the warnings and, if requested, a description of each kernel.
fn report(options: &AssemblerOptions, module: &Module) -> Result<(), Vec<String>> {
    for name in &options.entries {
        if !module.kernels().iter().any(|kernel| kernel.name == *name) {
            return Err(aborted(vec![fatal(&format!("Entry function '{name}' not found"))]));
        }
    }
    let refused = module.kernels().iter().filter_map(|kernel| Some((kernel, kernel.refusal.as_ref()?)));
    let warnings: Vec<String> = refused
        .map(|(kernel, why)| {
            let kind = if options.warnings_are_errors { "error  " } else { "warning" };
            format!("ptxas {kind} : kernel '{}' cannot run on the software GPU: {why}", kernel.name)
        })
        .collect();
    if options.warnings_are_errors && !warnings.is_empty() {
        return Err(aborted(warnings));
    }
    if options.warnings {
        warnings.iter().for_each(|warning| eprintln!("{warning}"));
    }
    if options.verbose {
        let bytes = |constant: bool| {
            let sizes = module.globals().iter().filter(|global| global.constant == constant);
            sizes.map(|global| global.size).fold(0, u64::saturating_add)
        };
        let constants = match bytes(true) {
            0 => String::new(),
            constants => format!(", {constants} bytes cmem[3]"),
        };
        eprintln!("ptxas info    : {} bytes gmem{constants}", bytes(false));
        module
            .kernels()
            .iter()
            .for_each(|kernel| eprintln!("{}", described(kernel, &options.architecture.name)));
    }
    Ok(())
}

/// The lines about a kernel, in the form that callers search for numbers. Nothing is ever spilled.
fn described(kernel: &Kernel, architecture: &str) -> String {
    let Kernel { name, local_bytes, registers, static_shared, param_bytes, .. } = kernel;
    let shared = match static_shared {
        0 => String::new(),
        bytes => format!(", {bytes} bytes smem"),
    };
    format!(
        "ptxas info    : Compiling entry function '{name}' for '{architecture}'\n\
         ptxas info    : Function properties for {name}\n    \
         {local_bytes} bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
         ptxas info    : Used {registers} registers{shared}, {param_bytes} bytes cmem[0]"
    )
}
