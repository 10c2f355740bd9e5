#!/usr/bin/env bash
# Makes a release of the commit that is checked out: dist/ with wheel, source archive and checksums,
# and a tag. Uploads nothing.
#
#   scripts/release.sh 0.2.0
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:?the version, for example 0.2.0}
refuse() { echo "release.sh: $1" >&2; exit 1; }

[ -z "$(git status --porcelain)" ] || refuse "the tree has changes: commit or remove them"
grep -qxF "version = \"$version\"" pyproject.toml || refuse "pyproject.toml has another version"
# The chart names the images by this version.
chart=deploy/helm/plexrl/Chart.yaml
grep -qxF "appVersion: $version" "$chart" || refuse "$chart has another appVersion"
grep -q "^## $version" CHANGELOG.md || refuse "CHANGELOG.md has no section '## $version'"
! git rev-parse -q --verify "refs/tags/v$version" >/dev/null || refuse "the tag v$version is there"

make lint test
.venv/bin/python -m pytest -q tests/test_wheel.py
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
python3 -m venv "$build"
"$build/bin/pip" install --quiet build
rm -rf dist
"$build/bin/python" -m build --outdir dist
(cd dist && sha256sum -- * > SHA256SUMS)
git tag -a "v$version" -m "PlexRL $version"
echo "dist/ and the tag v$version are made; publish with: git push origin v$version && twine upload dist/*.whl dist/*.tar.gz"
