//! `cargo xtask build-ebpf`: builds only the BPF objects.

use std::fs;

use anyhow::{Context as _, ensure};
use object::{Object as _, ObjectSection as _, ObjectSymbol as _, SymbolKind};

use crate::stack;

/// Size of a BPF instruction in bytes. (Loading a 64-bit constant counts as two instructions.)
const INSTRUCTION_SIZE: u64 = 8;

/// Arguments of `build-ebpf`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Fail on compiler warnings: clippy does not check code that is compiled for BPF only
    #[arg(long)]
    deny_warnings: bool,
}

/// Builds the objects, and prints their paths and the sizes of their functions. Checks that their programs have enough
/// stack on Linux 6.1.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let me = std::env::current_exe().context("cannot find the path of the xtask binary")?;
    let profile_dir = me.parent().context("xtask is not in a folder")?;
    let target_dir = ebpf_build::target_dir(profile_dir);
    let next_layout = target_dir.join("next-layout");
    for (binary, target_dir) in [
        (ebpf_build::DATAPATH, &target_dir),
        (ebpf_build::NEXT_DATAPATH, &next_layout),
        (ebpf_build::RESTORE, &target_dir),
        (ebpf_build::BASELINES, &target_dir),
    ] {
        let built = ebpf_build::build(binary, target_dir, std::env::consts::ARCH)?;
        eprint!("{}", built.warnings);
        let name = binary.name;
        ensure!(
            !args.deny_warnings || built.warnings.is_empty(),
            "the BPF object {name} builds with warnings"
        );
        show(&built)?;
    }
    Ok(())
}

fn show(built: &ebpf_build::Object) -> anyhow::Result<()> {
    let data = fs::read(&built.path).with_context(|| format!("cannot read {}", built.path.display()))?;
    let compiler = &built.toolchain.compiler;
    println!("{} ({} bytes)", built.path.display(), data.len());
    println!("compiler {} {}", compiler.rustc.display(), compiler.version);
    println!("linker   {}", built.toolchain.linker.display());
    let file = object::File::parse(&*data)
        .with_context(|| format!("{} is not an ELF file", built.path.display()))?;
    println!("\ninstructions  section     function");
    for function in functions(&file)? {
        println!("{:>12}  {:<10}  {}", function.instructions, function.section, function.name);
    }
    println!();
    check_stack(&file)
}

/// Fails if a chain of calls takes more stack than the verifier of Linux 6.1 allows.
fn check_stack(file: &object::File<'_>) -> anyhow::Result<()> {
    let Some(chain) = stack::deepest(file)? else { return Ok(()) };
    let (bytes, limit, functions) = (chain.bytes, stack::LIMIT, chain.functions.join(" → "));
    println!("{bytes} of {limit} bytes of stack on Linux 6.1: {functions}\n");
    ensure!(
        bytes <= limit,
        "these functions take {bytes} bytes of stack, and Linux 6.1 has {limit}: {functions}; make a frame smaller, or call \
         one after the other"
    );
    Ok(())
}

struct Function {
    section: String,
    name: String,
    instructions: u64,
}

/// The programs and the functions that they call, sorted by section.
fn functions(file: &object::File<'_>) -> anyhow::Result<Vec<Function>> {
    let mut functions = Vec::new();
    for symbol in file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text) {
        let Some(index) = symbol.section_index() else { continue };
        functions.push(Function {
            section: file.section_by_index(index)?.name()?.to_owned(),
            name: symbol.name()?.to_owned(),
            instructions: symbol.size() / INSTRUCTION_SIZE,
        });
    }
    functions.sort_by(|a, b| (&a.section, &a.name).cmp(&(&b.section, &b.name)));
    Ok(functions)
}
