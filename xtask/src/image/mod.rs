//! `cargo xtask image`: an OCI image of the agent, built without Docker and without a base image. The same commit,
//! toolchain and C library give the same bytes.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use object::Object as _;

use crate::{elf, release};

mod archive;
mod cross;
mod layout;
mod system;

use self::archive::{File, Files};
use self::layout::{About, Layer};
use self::system::{Arch, System};

/// Path of the agent in the image, as in `deploy/Dockerfile`.
const AGENT: &str = "usr/local/bin/lb-agent";
const NAME: (&str, &str) = ("lb-agent", env!("CARGO_PKG_VERSION"));
/// Makes the C library read `/etc/hosts`, which kubelet writes, before the library asks DNS. This order is the default
/// of new versions of glibc; older versions ask DNS first.
const NAME_SERVICES: &str = "hosts: files dns\n";

/// Arguments of `cargo xtask image`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Processor of the nodes [default: that of this machine]
    #[arg(long, value_enum)]
    arch: Option<Arch>,
}

/// Builds the agent, creates an image of it, checks the image, and prints its path.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let system = System::of(args.arch)?;
    let folder = release::empty_folder(&format!("image{}", system.suffix()))?;
    let program = system.stripped_agent(&folder)?;
    let image = Image { system, program, date: release::source_date()? }.build()?;
    let root = folder.join("root");
    unpack(&image, &root)?;
    release::check_version(&system.version_in(&root)?)?;
    let path = folder.join(format!("{}_{}{}.oci.tar", NAME.0, NAME.1, system.suffix()));
    fs::write(&path, image).with_context(|| format!("cannot write {}", path.display()))?;
    release::print_result(&path)
}

/// The parts of an image.
struct Image {
    system: System,
    program: PathBuf,
    /// The time of everything in the image, in seconds since 1970.
    date: u64,
}

impl Image {
    /// The image as an archive.
    fn build(&self) -> anyhow::Result<Vec<u8>> {
        let agent = read(&self.program, 0o755)?;
        let about = About {
            architecture: self.architecture(&agent.content)?,
            entrypoint: &format!("/{AGENT}"),
            arguments: &["run"],
            name: NAME,
        };
        let layers = [
            Layer { made_by: self.system.origin(), files: self.base()? },
            Layer { made_by: "cargo xtask image", files: Files::from([(AGENT.to_owned(), agent)]) },
        ];
        Ok(archive::tar(&layout::image(&layers, &about, self.date)?, self.date)?)
    }

    /// Go's name of the processor of the program. Fails if the system of the image requires another processor.
    fn architecture(&self, program: &[u8]) -> anyhow::Result<&'static str> {
        let is = object::File::parse(program).context("the agent is not an ELF file")?.architecture();
        let name = elf::processor_name(is)?;
        if let Some(expected) = self.system.architecture() {
            let expected = elf::processor_name(expected)?;
            ensure!(name == expected, "{} is for {name}, not for {expected}", self.program.display());
        }
        Ok(name)
    }

    /// The files that the program needs: the loader, the shared libraries, and `nsswitch.conf`. Includes the licences
    /// of the libraries if this machine has them.
    fn base(&self) -> anyhow::Result<Files> {
        let mut files = Files::new();
        for (path, library) in self.system.libraries(&self.program)? {
            files.insert(path, read(&library, 0o755)?);
        }
        let name_services = File { mode: 0o644, content: NAME_SERVICES.into() };
        files.insert("etc/nsswitch.conf".to_owned(), name_services);
        for path in self.system.copyrights().map(Path::new).into_iter().filter(|path| path.exists()) {
            files.insert(in_image(path), read(path, 0o644)?);
        }
        Ok(files)
    }
}

fn in_image(path: &Path) -> String {
    path.display().to_string().trim_start_matches('/').to_owned()
}

fn read(path: &Path, mode: u32) -> anyhow::Result<File> {
    let content = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(File { mode, content })
}

/// Unpacks the layers of an image into a folder that does not exist yet, as container runtimes do.
fn unpack(image: &[u8], root: &Path) -> anyhow::Result<()> {
    let files = archive::read(image)?;
    let blob = |descriptor: &serde_json::Value| {
        let digest = descriptor["digest"].as_str().and_then(|digest| digest.strip_prefix("sha256:"));
        let path = format!("blobs/sha256/{}", digest.context("a descriptor has no digest")?);
        files
            .get(&path)
            .map(|file| file.content.as_slice())
            .with_context(|| format!("the image has no {path}"))
    };
    let index: serde_json::Value =
        serde_json::from_slice(&files.get("index.json").context("the image has no index.json")?.content)?;
    let manifest: serde_json::Value = serde_json::from_slice(blob(&index["manifests"][0])?)?;
    fs::create_dir(root).with_context(|| format!("cannot create {}", root.display()))?;
    for layer in manifest["layers"].as_array().context("the manifest has no layers")? {
        tar::Archive::new(flate2::read::GzDecoder::new(blob(layer)?)).unpack(root)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use oci_spec::image::{ImageConfiguration, ImageIndex, ImageManifest, MediaType, OciLayout};

    use super::*;

    /// A program that is linked dynamically, as the agent is.
    const PROGRAM: &str = "/usr/bin/env";

    fn image() -> Vec<u8> {
        Image { system: System::Native, program: PROGRAM.into(), date: 1_700_000_000 }.build().unwrap()
    }

    #[test]
    fn program_runs_with_the_files_of_the_layers_alone() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        unpack(&image(), &root).unwrap();
        let answer = System::Native.version_in(&root).unwrap();
        assert!(answer.starts_with("env (GNU coreutils)"), "{answer}");
        fs::remove_file(root.join(in_image(&elf::libraries(Path::new(PROGRAM)).unwrap()[0]))).unwrap();
        System::Native.version_in(&root).unwrap_err();
    }

    #[test]
    fn two_builds_have_the_same_bytes() {
        assert!(image() == image());
    }

    #[test]
    fn image_is_what_the_specification_says() {
        let files = archive::read(&image()).unwrap();
        let content = |path: &str| files[path].content.as_slice();
        let blob =
            |digest: &oci_spec::image::Digest| content(&format!("blobs/sha256/{}", digest.digest())).to_vec();
        assert_eq!(OciLayout::from_reader(content("oci-layout")).unwrap().image_layout_version(), "1.0.0");

        let index = ImageIndex::from_reader(content("index.json")).unwrap();
        let [descriptor] = index.manifests().as_slice() else { panic!("{index:?}") };
        let text = blob(descriptor.digest());
        assert_eq!(descriptor.size(), text.len() as u64);
        let manifest = ImageManifest::from_reader(text.as_slice()).unwrap();
        assert_eq!(manifest.media_type(), &Some(MediaType::ImageManifest));
        assert_eq!(manifest.config().media_type(), &MediaType::ImageConfig);
        let config = ImageConfiguration::from_reader(blob(manifest.config().digest()).as_slice()).unwrap();
        assert_eq!(config.architecture(), descriptor.platform().as_ref().unwrap().architecture());
        let run = config.config().as_ref().unwrap();
        assert_eq!(run.entrypoint(), &Some(vec![format!("/{AGENT}")]));
        assert_eq!(run.cmd(), &Some(vec!["run".to_owned()]));

        assert_eq!(manifest.layers().len(), config.rootfs().diff_ids().len());
        for (layer, diff_id) in manifest.layers().iter().zip(config.rootfs().diff_ids()) {
            assert_eq!(layer.media_type(), &MediaType::ImageLayerGzip);
            let compressed = blob(layer.digest());
            assert_eq!(layer.digest().digest(), release::sha256(&compressed));
            let mut tar = Vec::new();
            std::io::copy(&mut flate2::read::GzDecoder::new(compressed.as_slice()), &mut tar).unwrap();
            assert_eq!(diff_id, &format!("sha256:{}", release::sha256(&tar)));
        }
    }

    #[test]
    fn image_starts_as_that_of_the_dockerfile() {
        let path = ebpf_build::workspace_root().join("deploy/Dockerfile");
        let text = fs::read_to_string(path).unwrap();
        assert!(text.contains(&format!("ENTRYPOINT [\"/{AGENT}\"]\nCMD [\"run\"]\n")), "{text}");
    }
}
