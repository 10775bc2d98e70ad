//! The needs of a program: the processor, shared libraries and glibc version of the system that runs it.

use std::collections::BTreeSet;

use anyhow::{Context as _, bail};
use object::{Architecture, Object as _};

use crate::elf;

/// The needs of an ELF program.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Needs {
    /// The processor that the program is for.
    pub(super) architecture: Architecture,
    /// The names of the shared libraries that the program needs, such as `libc.so.6`.
    pub(super) libraries: BTreeSet<String>,
    /// The oldest version of glibc that has all functions that the program calls: major and minor.
    pub(super) glibc: (u32, u32),
}

impl Needs {
    /// Reads from the ELF file of a program what the program needs. The program must be linked dynamically.
    pub(super) fn of(program: &[u8]) -> anyhow::Result<Self> {
        let file = object::File::parse(program).context("the program is not an ELF file")?;
        let names = elf::names(program)?;
        let versions = names.iter().filter_map(|name| version(name.strip_prefix("GLIBC_")?));
        Ok(Self {
            architecture: file.architecture(),
            libraries: elf::needed(program)?,
            glibc: versions.max().context("the program needs no version of glibc")?,
        })
    }

    /// Debian's name of the architecture.
    pub(super) fn debian_architecture(&self) -> anyhow::Result<&'static str> {
        elf::processor_name(self.architecture)
    }

    /// The field `Depends` of a Debian package with this program.
    pub(super) fn debian_packages(&self) -> anyhow::Result<String> {
        let (major, minor) = self.glibc;
        let mut packages = BTreeSet::from([format!("libc6 (>= {major}.{minor})")]);
        for library in &self.libraries {
            match library.as_str() {
                "libgcc_s.so.1" => packages.extend(["libgcc-s1".to_owned()]),
                "libc.so.6" | "libm.so.6" | "ld-linux-x86-64.so.2" | "ld-linux-aarch64.so.1" => {}
                other => bail!("the agent needs {other}: add its package to package/needs.rs"),
            }
        }
        Ok(packages.into_iter().collect::<Vec<_>>().join(", "))
    }
}

/// Major and minor version of `2.34` or `2.2.5`.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split('.').map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_of_this_program_are_found() {
        let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let needs = Needs::of(&program).unwrap();
        assert!(needs.libraries.contains("libc.so.6"), "{needs:?}");
        assert!(needs.glibc >= (2, 17), "{needs:?}");
        assert_eq!(
            needs.debian_architecture().is_ok(),
            cfg!(any(target_arch = "x86_64", target_arch = "aarch64"))
        );
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        assert_eq!(version("2.2.5"), Some((2, 2)));
        assert!(version("2.9") < version("2.34"));
        assert_eq!(version("PRIVATE"), None);
    }

    #[test]
    fn libraries_become_packages() {
        let needs = |libraries: &[&str]| Needs {
            architecture: Architecture::X86_64,
            libraries: libraries.iter().map(|&name| name.to_owned()).collect(),
            glibc: (2, 34),
        };
        let found = needs(&["libc.so.6", "libgcc_s.so.1", "libm.so.6"]).debian_packages().unwrap();
        assert_eq!(found, "libc6 (>= 2.34), libgcc-s1");
        let unknown = needs(&["libssl.so.3"]).debian_packages().unwrap_err().to_string();
        assert!(unknown.contains("libssl.so.3"), "{unknown}");
    }
}
