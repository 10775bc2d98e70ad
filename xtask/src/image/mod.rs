//! `cargo xtask image`: an OCI image of the agent, built without Docker and without a base image. The same commit,
//! toolchain and C library give the same bytes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use object::Object as _;

use crate::release;
use crate::{elf, user};

mod archive;
mod layout;

use self::archive::{File, Files};
use self::layout::{About, Layer};

/// Path of the agent in the image, as in `deploy/Dockerfile`.
const AGENT: &str = "usr/local/bin/lb-agent";
const NAME: (&str, &str) = ("lb-agent", env!("CARGO_PKG_VERSION"));
/// Makes the C library read `/etc/hosts`, which kubelet writes, before it asks DNS. That is the default of new versions
/// of glibc; older ones ask DNS first.
const NAME_SERVICES: &str = "hosts: files dns\n";
/// Licences of the libraries.
const COPYRIGHTS: [&str; 2] = ["/usr/share/doc/libc6/copyright", "/usr/share/doc/libgcc-s1/copyright"];

/// Creates an image of the built agent, checks it, and prints its path.
pub(crate) fn run() -> anyhow::Result<()> {
    let folder = release::empty_folder("image")?;
    let agent = release::stripped_agent(&folder)?;
    let image = build(&agent, release::source_date()?)?;
    let root = folder.join("root");
    unpack(&image, &root)?;
    release::check_version(&version_in(&root)?)?;
    let path = folder.join(format!("{}_{}.oci.tar", NAME.0, NAME.1));
    fs::write(&path, image).with_context(|| format!("cannot write {}", path.display()))?;
    release::print_result(&path)
}

/// The image of a program, as an archive.
fn build(program: &Path, date: u64) -> anyhow::Result<Vec<u8>> {
    let agent = read(program, 0o755)?;
    let about = About {
        architecture: architecture(&agent.content)?,
        entrypoint: &format!("/{AGENT}"),
        arguments: &["run"],
        name: NAME,
    };
    let layers = [
        Layer { made_by: "C library of the machine that built the agent", files: base(program)? },
        Layer { made_by: "cargo xtask image", files: Files::from([(AGENT.to_owned(), agent)]) },
    ];
    Ok(archive::tar(&layout::image(&layers, &about, date)?, date)?)
}

/// The files that the program needs: the loader and the shared libraries, at the paths where the loader searches, and
/// `nsswitch.conf`. Includes the licences of the libraries if this machine has them.
fn base(program: &Path) -> anyhow::Result<Files> {
    let mut files = Files::new();
    for library in elf::libraries(program)? {
        files.insert(in_image(&library), read(&library, 0o755)?);
    }
    let name_services = File { mode: 0o644, content: NAME_SERVICES.into() };
    files.insert("etc/nsswitch.conf".to_owned(), name_services);
    for path in COPYRIGHTS.map(Path::new).into_iter().filter(|path| path.exists()) {
        files.insert(in_image(path), read(path, 0o644)?);
    }
    Ok(files)
}

fn in_image(path: &Path) -> String {
    path.display().to_string().trim_start_matches('/').to_owned()
}

fn read(path: &Path, mode: u32) -> anyhow::Result<File> {
    let content = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(File { mode, content })
}

/// Go's name of the processor of a program.
fn architecture(program: &[u8]) -> anyhow::Result<&'static str> {
    elf::processor_name(object::File::parse(program).context("the agent is not an ELF file")?.architecture())
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

/// What the agent of an unpacked image answers to `--version`, with nothing but the files of the image.
fn version_in(root: &Path) -> anyhow::Result<String> {
    let mut command = Command::new("unshare");
    if !user::is_root()? {
        command.arg("--map-root-user");
    }
    let agent = PathBuf::from("/").join(AGENT);
    command.arg("--root").arg(root).arg(agent).arg("--version");
    release::output(command)
}

#[cfg(test)]
mod tests {
    use oci_spec::image::{ImageConfiguration, ImageIndex, ImageManifest, MediaType, OciLayout};

    use super::*;

    /// A program that is linked dynamically, as the agent is.
    const PROGRAM: &str = "/usr/bin/env";

    fn image() -> Vec<u8> {
        build(Path::new(PROGRAM), 1_700_000_000).unwrap()
    }

    #[test]
    fn program_runs_with_the_files_of_the_layers_alone() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        unpack(&image(), &root).unwrap();
        let answer = version_in(&root).unwrap();
        assert!(answer.starts_with("env (GNU coreutils)"), "{answer}");
        fs::remove_file(root.join(in_image(&elf::libraries(Path::new(PROGRAM)).unwrap()[0]))).unwrap();
        version_in(&root).unwrap_err();
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
